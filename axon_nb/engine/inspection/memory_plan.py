"""Collects what the memory planner needs from this rank: a model's skeleton, how it is trained, an estimate by formula.

Takes seconds to import. How a model is trained (strategy, ranks, dtypes, optimizer, batch) is inferred. No rank holds
the whole model of a pipeline: each sends its stages without their data, and the notebook assembles them.

Private hooks: the states of FSDP2's modules, read for units, dtype and whether parameters stay unsharded. On a torch
that lacks them, the defaults are assumed.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import axon_nb.plan.footprint.question  # noqa: F401 -- takes a second: not in the answering thread
from axon_nb import plan
from axon_nb.engine.inspection.memory import CallRecorder
from axon_nb.engine.session import RankSession
from axon_nb.engine.sharding import is_dtensor, loaded_class, unreplicated_reason
from axon_nb.errors import UsageError
from axon_nb.parallel.data.sharded_model import ShardedModel
from axon_nb.parallel.memory import FSDPMemoryStats, OptimizerKind, ShardingStrategy, model_states
from axon_nb.plan.errors import CaptureError
from axon_nb.plan.skeleton import capture, inner_model, is_recomputed, plain_class
from axon_nb.plan.tracing.subject import stacked_experts
from axon_nb.records.memory import WITH_MOMENTUM, MemorySetup, MemoryUse, changed
from axon_nb.records.protocol.inspection import ModelFacts, PlanReply
from axon_nb.torch_api import torch_api

_NO_FORMULA = "No estimate: formulas exist only for unsharded models, DDP, FSDP2 and ZeRO-1."
_PIPELINE = ("axon_nb.parallel.pipeline.stages", "HeldStages")
_THREE_D = ("axon_nb.parallel.three_d", "Parallel3D")
_SECTION = ("axon_nb.parallel.pipeline.stages", "Section")
_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row", "SequenceParallel": "sequence"}
"""Names that `axon_nb.parallel.parallelize` uses for torch's styles."""
_HAND_WRAPPED = "The stages are wrapped by hand; the prediction assumes unsharded stages."
_UNKNOWN_STYLES = "Some layers use unknown sharding styles; the prediction uses the default styles of `parallelize`."
_REPARTITIONED = "The prediction splits the model into stages by their numbers of parameters."
_SHARDED = ("axon_nb.parallel.data.sharded_model", "ShardedModel")
_COMPILED = ("torch._dynamo.eval_frame", "OptimizedModule")
_GPT = ("axon_nb.parallel.models", "GPT")
_OPTIONS = ("amsgrad", "momentum", "centered", "foreach", "fused")
"""Optimizer options that determine its memory."""


def estimate(
    modules: list[torch.nn.Module], optimizers: list[Optimizer], session: RankSession
) -> tuple[MemoryUse | None, str]:
    """Estimate parameters, gradients and optimizer state between steps.

    This is the only place that decides where estimates come from.

    Args:
        modules: The trained modules.
        optimizers: Their optimizers; empty: Adam is assumed.
        session: The rank.

    Returns:
        The estimate, None if there is no formula; and a sentence about what limits it, empty if nothing does.
    """
    try:
        zero1 = next((item for item in optimizers if type(item).__name__ == "ZeroRedundancyOptimizer"), None)
        parts = [_of_module(module, _kinds(module, optimizers), zero1) for module in modules]
    except Exception as error:  # such as a custom optimizer that cannot be instantiated
        return None, f"No estimate: {type(error).__name__}: {error}"
    if not parts or None in parts:
        return None, _NO_FORMULA
    estimates = [part for part in parts if part is not None]
    sizes = {
        "parameters": sum(part.param_memory_bytes for part in estimates),
        "gradients": sum(part.grad_memory_bytes for part in estimates),
        "optimizer": sum(part.optim_memory_bytes for part in estimates),
    }
    note = "" if optimizers else "No optimizer for this model found among the variables; the estimate assumes Adam."
    return MemoryUse(session.config.rank, time.monotonic_ns(), "estimate", sizes), note


def sharded_estimate(
    modules: list[torch.nn.Module], optimizers: list[Optimizer], session: RankSession
) -> tuple[int, int]:
    """Return the bytes of model states on each rank now, and with FSDP over all ranks; zeros if some are sharded.

    Args:
        modules: Modules; parameters that several of them hold count once.
        optimizers: Their optimizers; empty: Adam is assumed.
        session: The rank.
    """
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    size = session.config.world_size
    is_sharded = any(isinstance(module, ShardedModel) for module in modules) or unreplicated_reason(parameters)
    if size < 2 or not parameters or is_sharded:
        return 0, 0
    shapes = [(tuple(p.shape), p.dtype, p.requires_grad) for p in parameters]
    strategies = ((ShardingStrategy.NO_SHARD, 1), (ShardingStrategy.FULL_SHARD, size))
    here, sharded = (
        model_states(
            shapes, strategy, world_size=ranks, optimizer=_kind(optimizers), device_type=session.device.type
        ).total_bytes
        for strategy, ranks in strategies
    )
    return here, sharded


def _kind(optimizers: list[Optimizer]) -> OptimizerKind | None:
    return None if not optimizers else OptimizerKind(type(_inner_optimizer(optimizers[0])), _options(optimizers[0]))


def _kinds(module: nn.Module, optimizers: list[Optimizer]) -> OptimizerKind | list[OptimizerKind] | None:
    """The optimizer of each parameter if there are several, such as Muon for matrices and AdamW for the rest."""
    if len(optimizers) < 2:
        return _kind(optimizers)
    kinds = [OptimizerKind(type(_inner_optimizer(one)), _options(one)) for one in optimizers]
    held = {
        id(parameter): kind
        for one, kind in zip(optimizers, kinds, strict=True)
        for group in one.param_groups
        for parameter in group["params"]
    }
    return [held.get(id(parameter), kinds[0]) for parameter in module.parameters()]


def _inner_optimizer(optimizer: Optimizer) -> Optimizer:
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def _options(optimizer: Optimizer) -> dict[str, object]:
    defaults = _inner_optimizer(optimizer).defaults
    return {name: defaults[name] for name in ("amsgrad", "momentum", "centered") if name in defaults}


def _of_module(
    module: torch.nn.Module, kind: OptimizerKind | list[OptimizerKind] | None, zero1: Any
) -> FSDPMemoryStats | None:
    if isinstance(module, ShardedModel):  # it knows its unsharded shapes
        return module.memory_estimate(optimizer=kind)
    parameters: list[Any] = list(module.parameters())
    shapes = [(tuple(p.shape), p.dtype, p.requires_grad) for p in parameters]
    meshes = {p.device_mesh for p in parameters if is_dtensor(p)}
    if not meshes:
        if zero1 is None:
            return model_states(shapes, ShardingStrategy.NO_SHARD, world_size=1, optimizer=kind)
        place = {"world_size": zero1.world_size, "rank": zero1.rank}
        return model_states(shapes, ShardingStrategy.OPTIMIZER_STATE, optimizer=kind, **place)
    mesh = next(iter(meshes))
    if len(meshes) > 1 or not all(map(_is_fsdp, parameters)):
        return None
    last = mesh.ndim - 1
    return model_states(
        shapes,
        ShardingStrategy.FULL_SHARD if mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD,
        world_size=math.prod(mesh.shape),
        shard_size=mesh.size(last),
        rank=mesh.get_local_rank(last),
        optimizer=kind,
        device_type=mesh.device_type,
    )


def _is_fsdp(parameter: Any) -> bool:
    """Whether a parameter is sharded along its first dim over only the last axis of its mesh, as FSDP2 does."""
    if not is_dtensor(parameter):
        return False
    *copies, shard = parameter.placements
    return all(place.is_replicate() for place in copies) and bool(shard.is_shard(0))


def find_pipeline(module: Any) -> Any:
    """The `Pipeline` that this module is or contains; None if there is none."""
    inner: Any = module
    if issubclass(type(inner), loaded_class(*_THREE_D)):
        inner = inner.pipeline
    return inner if issubclass(type(inner), loaded_class(*_PIPELINE)) else None


def first_stage(module: Any) -> nn.Module | None:
    """The stage that receives a pipeline's inputs; None if it is on another rank, or if this is not a pipeline."""
    pipeline = find_pipeline(module)
    return None if pipeline is None else pipeline._stage_modules.get(0)


def pipeline_facts(
    module: Any, optimizer: str, calls: CallRecorder
) -> tuple[MemorySetup, list[Any] | None, dict[str, Any], list[str]]:
    """Describe how a pipeline is trained.

    Args:
        module: A `Pipeline` or `Parallel3D` whose first stage is on this rank.
        optimizer: The same as in `MemorySetup`.
        calls: How models were called.

    Returns:
        The setup; the inputs of the whole model, None if no call was recorded; ``schedule`` and ``tp_plan`` as
        `plan.memory` takes them; notes as sentences.
    """
    pipeline, notes = find_pipeline(module), []
    sizes, options = {"dp": 1, "tp": 1}, dict[str, Any]()
    tp_plan: Any = "auto"
    if module is not pipeline:
        sizes, options = {axis: module._axis_size(axis) for axis in sizes}, module._fsdp
        styles = {key: _STYLES.get(type(style).__name__) for key, style in module._plan.items()}
        tp_plan = "auto" if None in styles.values() else styles or "auto"
        notes += [_UNKNOWN_STYLES] if None in styles.values() else []
    elif _is_wrapped(pipeline):
        notes.append(_HAND_WRAPPED)
    policy = options.get("mp_policy")
    count = int(pipeline.num_microbatches)
    inputs = _full_batch(calls.inputs_of(pipeline._stage_modules[0]), count)
    batch = next((value["shape"][0] for value in inputs or () if isinstance(value, dict) and value["shape"]), count)
    setup = MemorySetup(
        world_size=pipeline.group.size() * sizes["dp"] * sizes["tp"],
        strategy="full_shard" if options.get("reshard_after_forward", True) else "shard_grad_op",
        mixed_precision="" if policy is None else str(policy.param_dtype).removeprefix("torch."),
        optimizer=optimizer,
        batch=batch,
        pp=pipeline.group.size(),
        tp=sizes["tp"],
        num_microbatches=count,
    )
    return setup, inputs, {"schedule": pipeline.schedule.value, "tp_plan": tp_plan}, [*notes, _REPARTITIONED]


def _is_wrapped(pipeline: Any) -> bool:
    stages = pipeline._stage_modules.values()
    is_ddp = any(isinstance(stage, DistributedDataParallel) for stage in stages)
    return is_ddp or any(map(is_dtensor, pipeline.parameters()))


def _full_batch(inputs: list[Any] | None, count: int) -> list[Any] | None:
    """Scale the inputs of one microbatch to the whole batch."""
    if inputs is None:
        return None
    full = []
    for value in inputs:
        sized = isinstance(value, dict) and value["shape"]
        full.append({**value, "shape": [value["shape"][0] * count, *value["shape"][1:]]} if sized else value)
    return full


def stage_skeletons(module: Any) -> dict[int, bytes]:
    """The skeletons of this rank's stages by stage number, as `join_stages` takes them.

    Raises:
        CaptureError: a stage cannot be sent to another process.
    """
    pipeline = find_pipeline(module)
    skeletons = {}
    for index, stage in pipeline._stage_modules.items():
        inner: Any = stage.module if isinstance(stage, DistributedDataParallel) else stage
        is_section = issubclass(type(inner), loaded_class(*_SECTION))
        children = inner.named_children() if is_section else [(str(index), inner)]
        skeletons[index] = capture(nn.Sequential(OrderedDict(children)), f"stage {index}", bare=True).factory
    return skeletons


def model_key(module: nn.Module, calls: CallRecorder) -> str:
    """A key that changes with the model and its inputs; cheap, because it is requested often."""
    inner, called = inner_model(module), _forward_module(module)
    calls.record_next(called)
    first = next(inner.parameters(), None)
    dtype = None if first is None else first.dtype
    return f"{id(inner)}:{type(inner).__name__}:{dtype}:{calls.inputs_of(called)}"


def describe_model(
    module: nn.Module, optimizers: list[Optimizer], session: RankSession, calls: CallRecorder
) -> ModelFacts:
    """Describe a model for the planner.

    Args:
        module: The model as the user holds it, with its wrappers.
        optimizers: The optimizers that step its parameters.
        session: This rank.
        calls: How models were called.
    """
    notes: list[str] = []
    name, options = _optimizer(optimizers, notes)
    if find_pipeline(module) is not None:
        setup, inputs, layout, more_notes = pipeline_facts(module, name, calls)
        return ModelFacts(setup, True, options, None, (), inputs, "mean", (*notes, *more_notes), **layout)
    inner = inner_model(module)
    inputs = calls.inputs_of(_forward_module(module))
    fields = {**_strategy(module, inner, optimizers, session, notes), "optimizer": name, "batch": _batch_size(inputs)}
    known = fields.pop("known")
    recomputed = sorted({plain_class(child).__name__ for child in inner.modules() if is_recomputed(child)})
    units = _units(inner)
    return ModelFacts(
        MemorySetup(**fields, activation_checkpointing=bool(recomputed)),
        known,
        options,
        tuple(sorted(units)) if units is not None else None,
        tuple(recomputed),
        inputs,
        "tokens" if isinstance(inner, loaded_class(*_GPT)) else "mean",
        tuple(notes),
        axes=("ep",) * bool(stacked_experts(inner)) + ("cp",) * _takes_tokens(inputs),
    )


def _takes_tokens(inputs: list[Any] | None) -> bool:
    """Whether the inputs are whole numbers by sample and position, and what has the same two dimensions."""
    tensors = [value for value in inputs or () if isinstance(value, dict)]
    shapes = {tuple(value["shape"][:2]) for value in tensors}
    return len(shapes) == 1 and len(tensors[0]["shape"]) == 2 and tensors[0]["dtype"] in ("int32", "int64")


def _forward_module(module: nn.Module) -> nn.Module:
    """The module whose inputs are recorded: the model itself, which names its arguments, or its compiled form."""
    if (stage := first_stage(module)) is not None:
        return stage
    while not isinstance(module, loaded_class(*_COMPILED)) and module is not (inner := _unwrap(module)):
        module = inner
    return module


def _unwrap(module: nn.Module) -> nn.Module:
    wraps = isinstance(module, (DistributedDataParallel, loaded_class(*_SHARDED)))
    return module.module if wraps else module  # type: ignore[return-value]


def _batch_size(inputs: list[Any] | None) -> int:
    sizes = [value["shape"][0] for value in inputs or () if isinstance(value, dict) and value["shape"]]
    return max(1, sizes[0]) if sizes else 1


def _optimizer(optimizers: list[Optimizer], notes: list[str]) -> tuple[str, dict[str, Any]]:
    if not optimizers:
        notes.append("No optimizer for this model found among the variables; assuming Adam.")
        return "adam", {}
    optimizer = getattr(optimizers[0], "optim", optimizers[0])
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        notes.append(f"{kind.__name__} is not one of torch's optimizers; assuming Adam.")
        return "adam", {}
    if len(optimizers) > 1:
        notes.append(f"Found {len(optimizers)} optimizers; assuming the first, {kind.__name__}, for all parameters.")
    options = {key: optimizer.defaults[key] for key in _OPTIONS if optimizer.defaults.get(key)}
    name = kind.__name__.lower()
    return WITH_MOMENTUM if name == "sgd" and "momentum" in options else name, options


def _strategy(
    module: nn.Module, inner: nn.Module, optimizers: list[Optimizer], session: RankSession, notes: list[str]
) -> dict[str, Any]:
    world = session.config.world_size
    zero1 = any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in optimizers)
    if isinstance(module, loaded_class(*_SHARDED)):
        sharded: Any = module
        mesh = sharded.mesh
        facts = {"strategy": sharded.strategy.value, "world_size": mesh.size(), "shard": mesh.size(mesh.ndim - 1)}
        facts |= {"cpu_offload": sharded.cpu_offload.value, "mixed_precision": _compute_dtype(inner)}
        return {**facts, "known": True}
    if isinstance(module, DistributedDataParallel):
        size = torch.distributed.get_world_size(module.process_group)
        return {"strategy": "optimizer_state" if zero1 else "ddp", "world_size": size, "shard": size, "known": True}
    parameters: list[Any] = list(inner.parameters())
    meshes = {p.device_mesh for p in parameters if is_dtensor(p)}
    if not meshes:
        notes.append(f"The model is not wrapped; the first prediction is for full_shard on all {world} ranks.")
        return {"strategy": "full_shard", "world_size": world, "shard": world, "known": False}
    mesh = max(meshes, key=lambda candidate: candidate.size())
    sizes = dict(zip(mesh.mesh_dim_names or map(str, range(mesh.ndim)), mesh.shape, strict=True))
    by_fsdp = _units(inner) is not None
    if "tp" in sizes or len(meshes) > 1 or not by_fsdp:
        notes.append("Layers are sharded, too; the prediction is for data parallelism with unsharded layers.")
        rest = math.prod(size for name, size in sizes.items() if name != "tp") if by_fsdp else world
        return {"strategy": "full_shard", "world_size": rest, "shard": rest, "known": False}
    keeps_unsharded = _keeps_unsharded(inner)
    strategy = "hybrid_shard" if mesh.ndim == 2 else "shard_grad_op" if keeps_unsharded else "full_shard"
    facts = {"strategy": strategy, "world_size": mesh.size(), "shard": mesh.size(mesh.ndim - 1)}
    return {**facts, "mixed_precision": _compute_dtype(inner), "known": True}


def _fsdp_states(inner: nn.Module) -> list[tuple[nn.Module, Any]]:
    modules: list[Any] = [child for child in inner.modules() if hasattr(child, "_get_fsdp_state")]
    return [(child, child._get_fsdp_state()) for child in modules]


def _units(inner: nn.Module) -> set[str] | None:
    states = _fsdp_states(inner)
    return {plain_class(child).__name__ for child, _ in states if child is not inner} if states else None


def _compute_dtype(inner: nn.Module) -> str:
    dtypes = [getattr(getattr(state, "_mp_policy", None), "param_dtype", None) for _, state in _fsdp_states(inner)]
    dtype = next(filter(None, dtypes), None)
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _keeps_unsharded(inner: nn.Module) -> bool:
    """Whether units stay unsharded from forward to backward; the root always does by default, so it does not count."""
    states = [state for child, state in _fsdp_states(inner) if child is not inner]
    groups = [group for state in states for group in torch_api().fsdp_parameter_groups(state)]
    return bool(groups) and all(getattr(group, "post_forward_mesh_info", True) is None for group in groups)


class Planner:
    """Answers plan requests.

    Args:
        session: This rank.
        calls: How its models were called.
    """

    def __init__(self, session: RankSession, calls: CallRecorder) -> None:
        self._session = session
        self._calls = calls
        self._skeleton = ("", b"")
        """Key and skeleton of the last model."""

    def inputs(
        self,
        module: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        what_if: Mapping[str, Any] | None,
        known_key: str,
        stages_only: bool = False,
    ) -> PlanReply:
        """Answer one plan request.

        Args:
            module: The model as the user holds it.
            optimizers: The optimizers that step its parameters.
            what_if: Fields of `MemorySetup` to change; None: the current setup.
            known_key: Key of the model that the notebook already has.
            stages_only: Whether to return only this rank's stages of a pipeline.
        """
        session = self._session
        if (pipeline := find_pipeline(module)) is not None and (stages_only or not pipeline.is_first):
            try:
                if stages_only:
                    return PlanReply(stages=stage_skeletons(module))
                return PlanReply(first_rank=pipeline.stage_ranks()[0])
            except CaptureError as error:
                return PlanReply(refused=str(error))
        facts = describe_model(module, optimizers, session, self._calls)
        facts = msgspec.structs.replace(facts, device=session.device.type)
        reply = PlanReply(facts=facts)
        try:
            setup = facts.setup if what_if is None else changed(facts.setup, what_if)
            reply = msgspec.structs.replace(reply, setup=setup, key=model_key(module, self._calls))
            if pipeline is not None:
                return msgspec.structs.replace(reply, ranks=dict(pipeline.stage_ranks()))
            factory = self._skeleton_of(module, reply.key)
            states, host = _estimate_states(factory, setup, facts, session)
            model = None if known_key == reply.key else factory
            return msgspec.structs.replace(reply, model=model, states=states, host=host)
        except CaptureError as error:
            return PlanReply(refused=str(error))
        except UsageError as error:
            return msgspec.structs.replace(reply, refused=str(error))

    def _skeleton_of(self, module: torch.nn.Module, key: str) -> bytes:
        if self._skeleton[0] != key:
            self._skeleton = (key, capture(module, bare=True).factory)
        return self._skeleton[1]


def _estimate_states(
    factory: bytes, setup: MemorySetup, facts: ModelFacts, session: RankSession
) -> tuple[dict[str, int], int]:
    """Estimate, for the rank that holds most, the bytes by role, and those in host memory."""
    estimate = plan.memory(
        plan.CapturedModel("model", factory),
        **setup.plan_options(facts.setup, facts.optimizer_options),
        inputs=plan.TensorSpec(("seq",)),  # nothing runs
        device=session.device.type,
        fragmentation=0.0,
        method="closed_form",
    )
    worst = estimate.worst
    return {name: size for name, size in worst.persistent.as_dict().items() if size}, worst.host_bytes
