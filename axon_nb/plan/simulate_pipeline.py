"""A rank of a pipeline, without data: its stages, sharded where wanted, and torch's own schedule that drives them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages, stages_of_rank
from axon_nb.parallel.pipeline.split import Section, balance, child_costs, split_sections
from axon_nb.parallel.pipeline.torch_hooks import schedule_class
from axon_nb.plan.errors import PlanError
from axon_nb.plan.memory_request import MemoryRequest
from axon_nb.plan.simulate_model import Question, explained, optimizer_of
from axon_nb.plan.simulate_training import Enter, Meshes, Training, cut_layers
from axon_nb.torch_api import torch_api

__all__ = ["pipeline_of", "stages_on"]

Border = tuple[torch.Tensor, ...]
"""What goes from one stage to the next for one microbatch."""
_PHASES = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
}


def stages_on(request: MemoryRequest, model: nn.Module, place: int) -> dict[int, Section]:
    """The stages that one rank of a pipeline holds, cut as `Pipeline.split` does by the number of parameters.

    Args:
        request: What is asked.
        model: The whole; its modules are shared.
        place: Of the rank along the axis pp.

    Raises:
        UsageError: the model cannot be cut so, or the schedule cannot run it.
        PlanError: the batch cannot be cut so.
    """
    schedule, num_stages, count = _numbers(request)
    check_counts(schedule, num_ranks=request.size("pp"), num_stages=num_stages, num_microbatches=count)
    stages = _all_stages(model, num_stages)
    held = stages_of_rank(schedule, place, num_ranks=request.size("pp"), num_stages=num_stages)
    return {index: stages[index] for index in held}


def _numbers(request: MemoryRequest) -> tuple[PipelineSchedule, int, int]:
    """The schedule, the number of stages, and that of microbatches."""
    schedule = PipelineSchedule.of(request.schedule)
    num_stages = default_num_stages(schedule, request.size("pp"))
    count, batch = request.microbatches or num_stages, request.batch
    if batch % count:
        raise PlanError(
            f"batch={batch} in {count} microbatches: it is a multiple of them, such as "
            f"{-(-batch // count) * count}; or give another number of microbatches=."
        )
    return schedule, num_stages, count


def _all_stages(model: nn.Module, num_stages: int) -> list[Section]:
    costs = child_costs(model, "params")
    starts = balance(list(costs.values()), num_stages)
    return split_sections(model, [list(costs)[start] for start in starts[1:]])


def pipeline_of(question: Question, model: nn.Module, meshes: Meshes) -> Training:
    """One rank of a pipeline, its stages cut and sharded as `Parallel3D` does.

    Args:
        question: What is run.
        model: The whole, made by it.
        meshes: The ranks.

    Raises:
        PlanError: an option has no meaning in a pipeline.
        UsageError: the model cannot be cut so.
    """
    assert meshes.stages is not None
    request = question.request
    if request.mixed_precision is not None and request.size("dp") == 1:
        raise PlanError(
            "mixed_precision with pp and no dp of 2 or more: it comes with FSDP; dtype= converts the model."
        )
    _, num_stages, count = _numbers(request)
    args, target = question.inputs(), question.target()
    with explained("run", "inputs= is what the model takes"):
        borders = _borders(request, _all_stages(model, num_stages), args, count)
    cut_layers(question, model, meshes)
    held = stages_on(request, model, meshes.stages.get_local_rank())
    part = nn.Module()
    for stage in held.values():
        for name, child in stage.named_children():
            part.add_module(name, child)
        if request.size("dp") > 1:
            _shard(stage, request, meshes.data)
    kind = optimizer_of(request)
    optimizer = kind.make(list(part.parameters()), **kind.options)
    given = args if 0 in held else ()
    wanted = target if num_stages - 1 in held else None
    enters: list[Enter] = []
    driver = _driver(question, held, borders, meshes.stages, enters)

    def compute(enter: Enter) -> None:
        enters[:] = [enter]
        with torch_api().static_stages():
            driver.step(*given, target=wanted, return_outputs=False)

    return Training(part, optimizer, compute, (given, wanted))


def _driver(
    question: Question, held: Mapping[int, nn.Module], borders: list[Border], mesh: DeviceMesh, enters: list[Enter]
) -> Any:
    """Torch's schedule of this rank's stages, as `Pipeline` makes it."""
    from torch.distributed.pipelining import PipelineStage

    schedule, num_stages, count = _numbers(question.request)
    group = mesh.get_group()
    stages = [
        PipelineStage(
            module,
            index,
            num_stages,
            torch.device("cpu"),
            input_args=borders[index],
            output_args=borders[index + 1],
            group=group,
        )
        for index, module in held.items()
    ]
    for stage in stages:
        for name, phase in _PHASES.items():
            setattr(stage, name, _telling(getattr(stage, name), phase, enters))

    def loss_of(output: Any, wanted: Any) -> torch.Tensor:
        return question.loss(output, wanted) / count

    made = schedule_class(schedule)
    return made(stages if schedule.has_many_stages else stages[0], count, loss_fn=loss_of, scale_grads=False)


def _telling(call: Callable[..., Any], phase: str, enters: list[Enter]) -> Callable[..., Any]:
    @functools.wraps(call)
    def told(*args: Any, **kwargs: Any) -> Any:
        enters[0](phase)
        return call(*args, **kwargs)

    return told


def _borders(request: MemoryRequest, stages: list[Section], args: tuple[Any, ...], count: int) -> list[Border]:
    """What goes into each stage for one microbatch, and what comes out of the last one."""
    kind = None if request.mixed_precision is None else getattr(torch, request.mixed_precision)
    value = tuple(item[: request.batch // count] for item in args)
    found = [value]
    for stage in stages:
        output = stage(*value)
        value = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(item, torch.Tensor) for item in value):
            raise PlanError(f"a stage gives {[type(item).__name__ for item in value]}: only tensors are sent.")
        found.append(tuple(_sent(item, kind) for item in value))
    return found


def _sent(value: torch.Tensor, kind: torch.dtype | None) -> torch.Tensor:
    kept = value.detach()
    if kind is not None and kept.is_floating_point():
        kept = kept.to(kind)  # FSDP computes in it
    return kept.requires_grad_(value.requires_grad)


def _shard(stage: nn.Module, request: MemoryRequest, mesh: DeviceMesh) -> None:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": request.strategy == "full_shard"}
    if request.mixed_precision is not None:
        dtype = getattr(torch, request.mixed_precision)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for child in stage.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    fully_shard(stage, **options)
