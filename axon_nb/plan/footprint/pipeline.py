"""One pipeline rank without data: its stages, sharded over data ranks if wanted, driven by torch's own schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages, stages_of_rank
from axon_nb.parallel.pipeline.stages import Section, balance, child_costs, split_sections
from axon_nb.parallel.pipeline.torch_hooks import schedule_class
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.question import TrainingSetup, explain_failure, request_optimizer
from axon_nb.plan.footprint.request import MemoryRequest
from axon_nb.plan.footprint.training import PhaseCallback, RankMeshes, Training, shard_layers
from axon_nb.plan.tracing.model_parts import NamedStage, part_costs, pipeline_parts
from axon_nb.torch_api import torch_api

Boundary = tuple[torch.Tensor, ...]
"""The tensors that cross a stage boundary for one microbatch."""
_Stage = Section | NamedStage
_PHASES = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
}


def stages_on_rank(request: MemoryRequest, model: nn.Module, place: int) -> dict[int, _Stage]:
    """Return the stages that one pipeline rank holds, split by parameter count as in `Pipeline.split`.

    Args:
        request: The request.
        model: The whole model; its modules are shared.
        place: The rank's coordinate along pp.

    Raises:
        CommError: the model cannot be split in this way, or the schedule cannot run it.
        PlanError: the batch cannot be split in this way.
    """
    schedule, num_stages, count = _numbers(request)
    check_counts(schedule, num_ranks=request.size("pp"), num_stages=num_stages, num_microbatches=count)
    stages = all_stages(model, num_stages)
    own_stages = stages_of_rank(schedule, place, num_ranks=request.size("pp"), num_stages=num_stages)
    return {index: stages[index] for index in own_stages}


def _numbers(request: MemoryRequest) -> tuple[PipelineSchedule, int, int]:
    """The schedule, the number of stages and the number of microbatches."""
    schedule = PipelineSchedule.of(request.schedule)
    num_stages = default_num_stages(schedule, request.size("pp"))
    count, batch = request.num_microbatches or num_stages, request.batch
    if batch % count:
        raise PlanError(
            f"batch ({batch}) must be divisible by num_microbatches ({count}): use batch={-(-batch // count) * count}, "
            "or change num_microbatches=."
        )
    return schedule, num_stages, count


def all_stages(model: nn.Module, num_stages: int) -> list[_Stage]:
    """Split a Sequential, or a model of transformers between its decoder layers, by parameter count.

    Args:
        model: The whole model; its modules are shared.
        num_stages: Of all ranks.

    Raises:
        UsageError: the model cannot be split in this way.
    """
    parts = pipeline_parts(model)
    costs = part_costs(model, parts) if parts else child_costs(model, "params")
    starts, names = balance(list(costs.values()), num_stages), list(costs)
    if not parts:
        return [*split_sections(model, [names[start] for start in starts[1:]])]
    return [NamedStage(model, names[first:second]) for first, second in pairwise([*starts, len(names)])]


def _parts_of(stage: _Stage) -> dict[str, nn.Module]:
    return stage.parts if isinstance(stage, NamedStage) else dict(stage.named_children())


def make_pipeline_training(setup: TrainingSetup, model: nn.Module, meshes: RankMeshes) -> Training:
    """Make one pipeline rank, its stages sharded as in `Parallel3D`.

    Args:
        setup: What to run.
        model: The whole model, made by `setup`.
        meshes: The ranks.

    Raises:
        PlanError: an option does not work in a pipeline.
        CommError: the model cannot be split in this way.
    """
    assert meshes.stages is not None
    request = setup.request
    if request.mixed_precision is not None and request.size("dp") == 1:
        raise PlanError(
            "mixed_precision with pp requires FSDP: use a dp axis of 2 or more, or convert the model with dtype=."
        )
    _, num_stages, count = _numbers(request)
    args, target = setup.inputs(), setup.target()
    with explain_failure("run", "check that inputs= fits the model"):
        boundaries = _boundaries(request, all_stages(model, num_stages), args, count)
    shard_layers(setup, model, meshes)
    own_stages = stages_on_rank(request, model, meshes.stages.get_local_rank())
    part = nn.Module()
    for stage in own_stages.values():
        for name, child in _parts_of(stage).items():
            _hold(part, name, child)
        if request.size("dp") > 1:
            _shard(stage, request, meshes.data)
    kind = request_optimizer(request)
    optimizer = kind.make(list(part.parameters()), **kind.options)
    stage_inputs = args if 0 in own_stages else ()
    stage_target = target if num_stages - 1 in own_stages else None
    on_phase: list[PhaseCallback] = []
    driver = _driver(setup, own_stages, boundaries, meshes.stages, on_phase)

    def compute(on_phase_start: PhaseCallback) -> None:
        on_phase[:] = [on_phase_start]
        with torch_api().static_stages():
            driver.step(*stage_inputs, target=stage_target, return_outputs=False)

    return Training(part, optimizer, compute, (stage_inputs, stage_target))


def _hold(owner: nn.Module, path: str, module: nn.Module) -> None:
    """Hold a module under its path in the whole model."""
    first, _, rest = path.partition(".")
    if not rest:
        owner.add_module(first, module)
        return
    if first not in dict(owner.named_children()):
        owner.add_module(first, nn.Module())
    _hold(owner.get_submodule(first), rest, module)


def _driver(
    setup: TrainingSetup,
    own_stages: Mapping[int, _Stage],
    boundaries: list[Boundary],
    mesh: DeviceMesh,
    on_phase: list[PhaseCallback],
) -> Any:
    """Torch's schedule of this rank's stages, as `Pipeline` makes it."""
    from torch.distributed.pipelining import PipelineStage

    schedule, num_stages, count = _numbers(setup.request)
    group = mesh.get_group()
    stages = [
        PipelineStage(
            module,
            index,
            num_stages,
            torch.device("cpu"),
            input_args=boundaries[index],
            output_args=boundaries[index + 1],
            group=group,
        )
        for index, module in own_stages.items()
    ]
    for stage in stages:
        for name, phase in _PHASES.items():
            setattr(stage, name, _reporting_phase(getattr(stage, name), phase, on_phase))

    is_named = any(isinstance(stage, NamedStage) for stage in own_stages.values())
    as_output = NamedStage.as_output if is_named else _unchanged

    def loss_of(output: Any, stage_target: Any) -> torch.Tensor:
        return setup.loss(as_output(output), stage_target) / count

    made = schedule_class(schedule)
    return made(stages if schedule.has_many_stages else stages[0], count, loss_fn=loss_of, scale_grads=False)


def _unchanged(output: Any) -> Any:
    return output


def _reporting_phase(call: Callable[..., Any], phase: str, on_phase: list[PhaseCallback]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        on_phase[0](phase)
        return call(*args, **kwargs)

    return called


def _boundaries(request: MemoryRequest, stages: Sequence[_Stage], args: tuple[Any, ...], count: int) -> list[Boundary]:
    """The inputs of each stage for one microbatch, and the outputs of the last one."""
    kind = None if request.mixed_precision is None else getattr(torch, request.mixed_precision)
    value = tuple(item[: request.batch // count] for item in args)
    boundaries = [value]
    for stage in stages:
        output = stage(*value)
        value = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(item, torch.Tensor) for item in value):
            raise PlanError(
                f"Pipeline stages must return tensors; one returned {[type(item).__name__ for item in value]}."
            )
        boundaries.append(tuple(_sent(item, kind) for item in value))
    return boundaries


def _sent(value: torch.Tensor, kind: torch.dtype | None) -> torch.Tensor:
    kept = value.detach()
    if kind is not None and kept.is_floating_point():
        kept = kept.to(kind)  # FSDP computes in it
    return kept.requires_grad_(value.requires_grad)


def _shard(stage: _Stage, request: MemoryRequest, mesh: DeviceMesh) -> None:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": request.strategy == "full_shard"}
    if request.mixed_precision is not None:
        dtype = getattr(torch, request.mixed_precision)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for child in _parts_of(stage).values():
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    fully_shard(stage, **options)
