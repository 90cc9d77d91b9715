"""A rank's model in training, without data: sharded or replicated, with its optimizer and its step.

A pipeline rank has its stages, sharded over data ranks if wanted, driven by torch's own schedule.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from axon_nb.parallel.data.sharded_model import FSDP, _zero_redundancy
from axon_nb.parallel.data.units import local_shard, offload_states
from axon_nb.parallel.memory import CPUOffload, OptimizerKind, ShardingStrategy, local_optimizer, optimizer_states
from axon_nb.parallel.pipeline import schedule as schedules
from axon_nb.parallel.pipeline.stages import Section, balance, child_costs, split_sections
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.fake_world import mesh_of
from axon_nb.plan.footprint.plan import MemoryRequest
from axon_nb.plan.footprint.question import TrainingSetup, expert_modules, explain_failure, request_optimizer
from axon_nb.plan.muon import groups, is_muon, matrix_names
from axon_nb.plan.tracing.fake_tensors import replaced
from axon_nb.plan.tracing.subject import NamedStage, checked_module_filter, part_costs, pipeline_parts
from axon_nb.torch_api import torch_api

Shape = tuple[tuple[int, ...], torch.dtype, bool]
"""A parameter's shape, dtype and requires_grad."""
PhaseCallback = Callable[[str], None]
"""Called with the phase of a step that starts."""
Boundary = tuple[torch.Tensor, ...]
"""The tensors that cross a stage boundary for one microbatch."""
_Stage = Section | NamedStage
_PHASES = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
}


class RankMeshes(Struct, frozen=True):
    """The device meshes of data, layers and stages; made outside `fake_tensors`."""

    data: DeviceMesh
    layers: DeviceMesh | None
    stages: DeviceMesh | None
    experts: DeviceMesh | None
    """The data ranks that hold the same experts; None: all do."""

    @staticmethod
    def of(request: MemoryRequest) -> RankMeshes:
        """Make the meshes of a request."""
        no_shard = request.strategy == "no_shard"  # every rank is a replica, "sharded" over itself alone
        axes = dict(request.mesh)
        if {"ep", "cp"} & axes.keys():  # one rank does the same along these axes as along dp
            rest = {"dp": request.num_sharers, "tp": axes.get("tp", 1)}
            axes = {"pp": axes["pp"], **rest} if "pp" in axes else rest
        if no_shard:
            axes = {"replicate": axes.get("dp", 1), "shard": 1} | {k: v for k, v in axes.items() if k != "dp"}
        elif request.strategy != "hybrid_shard":
            axes.setdefault("dp", 1)  # at the end, where its position does not matter
        mesh = mesh_of(axes)
        experts = None
        if (ep := request.size("ep")) > 1:
            within = {"others": request.size("pp") * ep, "dp": request.num_sharers // ep, "tp": request.size("tp")}
            experts = mesh_of(within)["dp"]
        data = ("replicate", "shard") if "shard" in axes else ("dp",)
        data_mesh = mesh if tuple(axes) == data else mesh[data if len(data) > 1 else data[0]]
        layers, stages = (mesh[axis] if request.size(axis) > 1 else None for axis in ("tp", "pp"))
        return RankMeshes(data_mesh, layers, stages, experts)


class Training(Struct, frozen=True):
    """One rank's training state."""

    model: nn.Module
    """Holds the parameters; its modules have the names of the original model."""
    optimizer: Optimizer
    compute: Callable[[PhaseCallback], None]
    """Runs forward and backward of one batch; its argument is called with the phase that starts."""
    inputs: tuple[Any, ...]

    def make_states(self) -> None:
        """Have the optimizer create its states, as its first step does."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> list[torch.Tensor]:
        """The optimizer's states, without scalars."""
        return optimizer_states(self.optimizer)

    def scalar_states(self) -> list[torch.Tensor]:
        """The optimizer's scalar states."""
        values = [value for state in local_optimizer(self.optimizer).state.values() for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor) and value.ndim == 0]

    def modules(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of parameters, gradients and optimizer states of each module, without submodules and padding."""
        states = local_optimizer(self.optimizer).state
        sizes = {}
        for name, module in self.model.named_modules():
            parameters = list(module.parameters(recurse=False))
            kept = [value for p in parameters if p in states for value in states[p].values()]
            sizes[name] = (
                _bytes(parameters),
                _bytes([p.grad for p in parameters if p.grad is not None]),
                _bytes([value for value in kept if isinstance(value, torch.Tensor) and value.ndim]),
            )
        return sizes


def shard_layers(setup: TrainingSetup, model: nn.Module, meshes: RankMeshes) -> nn.Module:
    """Shard layers over tp, in place."""
    if meshes.layers is not None:
        # `parallelize` broadcasts rank 0's values first; here there are no values and no other ranks.
        module: Any = import_module("axon_nb.parallel.tensor.parallelize")
        with replaced(module, "broadcast", lambda tensor, **_: tensor):
            module.parallelize(model, setup.request.tp_plan, mesh=meshes.layers)
    return model


def local_shapes(modules: Iterable[nn.Module], kinds: Mapping[nn.Parameter, object], kind: object) -> list[Shape]:
    """Return the shapes of a rank's parameters of a kind before data ranks shard them."""
    parameters = [parameter for module in modules for parameter in module.parameters() if kinds[parameter] == kind]
    return [(tuple(local_shard(p).shape), p.dtype, p.requires_grad) for p in parameters]


def make_training(setup: TrainingSetup, model: nn.Module, meshes: RankMeshes) -> Training:
    """Shard, replicate or split a model into stages as requested, and make its optimizer.

    Args:
        setup: What to run.
        model: Made by `setup`; changed in place.
        meshes: The ranks.

    Raises:
        PlanError: an option does not work in a pipeline.
        UsageError: it cannot be sharded in this way.
    """
    request = setup.request
    is_replicated = request.strategy in ("ddp", "optimizer_state")
    kind = request_optimizer(request)
    matrices = matrix_names(model) if is_muon(kind.make) else None

    def parameters_of(held: nn.Module) -> list[Any]:
        return list(held.parameters()) if matrices is None else groups(held, matrices)

    if meshes.stages is not None:
        return _pipeline_training(setup, model, meshes, lambda part: kind.make(parameters_of(part), **kind.options))
    shard_layers(setup, model, meshes)
    args, target = setup.inputs(), setup.target()
    if request.is_unwrapped:
        wrapped, optimizer = model, kind.make(parameters_of(model), **kind.options)
    else:
        if meshes.experts is not None and not is_replicated:
            for module in expert_modules(model, request):
                fully_shard(module, **_fsdp_options(request, meshes.experts))
        wrap = _in_ddp if is_replicated else _in_fsdp
        wrapped, optimizer = wrap(model, request, meshes.data, kind, lambda: parameters_of(model))
    precise = request.mixed_precision is None or not is_replicated
    casting = contextlib.nullcontext if precise else functools.partial(_autocast, str(request.mixed_precision))

    def compute(on_phase_start: PhaseCallback) -> None:
        on_phase_start("forward")
        with casting():
            loss = setup.loss(wrapped(*args), target)
        on_phase_start("backward")
        loss.backward()

    return Training(model, optimizer, compute, (args, target))


def _in_fsdp(
    model: nn.Module,
    request: MemoryRequest,
    mesh: DeviceMesh,
    kind: OptimizerKind,
    parameters: Callable[[], list[Any]],
) -> tuple[nn.Module, Optimizer]:
    wrapped = FSDP(
        model,
        strategy=ShardingStrategy(request.strategy),
        mesh=mesh,
        wrap=checked_module_filter(model, request.wrap, "wrap"),
        mixed_precision=None if request.mixed_precision is None else getattr(torch, request.mixed_precision),
        cpu_offload=CPUOffload(request.cpu_offload),
        keep_whole=request.keep_whole,
        sync_parameters=False,
    )
    return wrapped, wrapped.optimizer(kind.make, parameters(), **kind.options)


def _in_ddp(
    model: nn.Module,
    request: MemoryRequest,
    mesh: DeviceMesh,
    kind: OptimizerKind,
    parameters: Callable[[], list[Any]],
) -> tuple[nn.Module, Optimizer]:
    """Wrap as `axon_nb.parallel.DDP` and `ZeRO1` do, without checking the other ranks' models."""
    sharded = request.strategy == "optimizer_state"
    group: Any = mesh.get_group()
    wrapped = DistributedDataParallel(model, process_group=group, init_sync=False, gradient_as_bucket_view=sharded)
    # The fake group's all-reduce does not return what DDP expects.
    wrapped.register_comm_hook(None, noop_hook)
    if not sharded:
        return wrapped, kind.make(parameters(), **kind.options)
    options: dict[str, Any] = {"parameters_as_bucket_view": True, **kind.options}
    optimizer: Optimizer = _zero_redundancy()(parameters(), optimizer_class=kind.make, process_group=group, **options)
    if request.cpu_offload == "optimizer_states":
        offload_states(optimizer, torch.device("cpu"))
    return wrapped, optimizer


@contextlib.contextmanager
def _autocast(dtype: str) -> Iterator[None]:
    with torch.autocast("cpu", getattr(torch, dtype)):
        yield


def _bytes(tensors: list[Any]) -> int:
    return sum(local_shard(tensor).nbytes for tensor in tensors)


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
    schedules.check_counts(schedule, num_ranks=request.size("pp"), num_stages=num_stages, num_microbatches=count)
    stages = all_stages(model, num_stages)
    own_stages = schedules.stages_of_rank(schedule, place, num_ranks=request.size("pp"), num_stages=num_stages)
    return {index: stages[index] for index in own_stages}


def _numbers(request: MemoryRequest) -> tuple[schedules.PipelineSchedule, int, int]:
    """The schedule, the number of stages and the number of microbatches."""
    schedule = schedules.PipelineSchedule.of(request.schedule)
    num_stages = schedules.default_num_stages(schedule, request.size("pp"))
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


def _pipeline_training(
    setup: TrainingSetup, model: nn.Module, meshes: RankMeshes, optimizer_of: Callable[[nn.Module], Optimizer]
) -> Training:
    """Make one pipeline rank, its stages sharded as in `Parallel3D`."""
    assert meshes.stages is not None
    request = setup.request
    if request.mixed_precision is not None and request.num_sharers == 1:
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
        if request.num_sharers > 1:
            _shard(stage, request, meshes)
    stage_inputs = args if 0 in own_stages else ()
    stage_target = target if num_stages - 1 in own_stages else None
    on_phase: list[PhaseCallback] = []
    driver = _driver(setup, own_stages, boundaries, meshes.stages, on_phase)

    def compute(on_phase_start: PhaseCallback) -> None:
        on_phase[:] = [on_phase_start]
        with torch_api().static_stages():
            torch_api().run_schedule(driver, *stage_inputs, target=stage_target)

    return Training(part, optimizer_of(part), compute, (stage_inputs, stage_target))


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

    made = schedules.schedule_class(schedule)
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


def _fsdp_options(request: MemoryRequest, mesh: DeviceMesh) -> dict[str, Any]:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": request.strategy == "full_shard"}
    if request.mixed_precision is not None:
        dtype = getattr(torch, request.mixed_precision)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return options


def _shard(stage: _Stage, request: MemoryRequest, meshes: RankMeshes) -> None:
    options = _fsdp_options(request, meshes.data)
    if meshes.experts is not None:
        for module in expert_modules(stage, request):
            fully_shard(module, **_fsdp_options(request, meshes.experts))
    for child in _parts_of(stage).values():
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    fully_shard(stage, **options)
