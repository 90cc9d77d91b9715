"""Infers how a model of this rank is trained: strategy, ranks, dtypes, optimizer, batch.

Private hooks: the states of FSDP2's modules, read for units, dtype and whether parameters stay unsharded. On a torch
that lacks them, the defaults are assumed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from axon_nb.engine.inspection.last_call import CallRecorder
from axon_nb.engine.inspection.pipeline_facts import find_pipeline, first_stage, pipeline_facts
from axon_nb.engine.session import RankSession
from axon_nb.engine.sharding.sharded import is_dtensor, loaded_class
from axon_nb.plan.skeleton import inner_model, is_recomputed, plain_class
from axon_nb.records.memory import WITH_MOMENTUM, MemorySetup
from axon_nb.records.protocol.contents import ModelFacts
from axon_nb.torch_api import torch_api

_SHARDED = ("axon_nb.parallel.data.sharded_model", "ShardedModel")
_COMPILED = ("torch._dynamo.eval_frame", "OptimizedModule")
_GPT = ("axon_nb.parallel.models.gpt", "GPT")
_OPTIONS = ("amsgrad", "momentum", "centered", "foreach", "fused")
"""Optimizer options that determine its memory."""


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
    )


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
