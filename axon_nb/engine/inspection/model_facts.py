"""How a model of this rank is trained now, as far as it shows: strategy, ranks, dtypes, optimizer, batch.

Private hooks: the states of FSDP2's modules, read for their units, their dtype and whether they stay whole. A torch
that has them no more is taken for one with the defaults.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from axon_nb.engine.inspection.last_call import called_with, look_at_next_call
from axon_nb.engine.inspection.model_skeleton import inner_model, is_recomputed, plain_class
from axon_nb.engine.inspection.pipeline_facts import first_stage, held_stages, pipeline_facts
from axon_nb.engine.session import RankSession
from axon_nb.engine.sharding.sharded import is_dtensor, loaded
from axon_nb.records.memory import WITH_MOMENTUM, MemorySetup
from axon_nb.records.protocol.contents import ModelFacts
from axon_nb.torch_api import torch_api

__all__ = ["facts_of", "model_key"]

_SHARDED = ("axon_nb.parallel.data.sharded_model", "ShardedModel")
_COMPILED = ("torch._dynamo.eval_frame", "OptimizedModule")
_GPT = ("axon_nb.parallel.models.gpt", "GPT")
_OPTIONS = ("amsgrad", "momentum", "centered", "foreach", "fused")
"""Of an optimizer: those that decide over what it holds."""


def model_key(module: nn.Module) -> str:
    """Changes with what the model is and how it is called; cheap, as it is asked often."""
    inner = inner_model(module)
    look_at_next_call(_called(module))
    first = next(inner.parameters(), None)
    return f"{id(inner)}:{type(inner).__name__}:{None if first is None else first.dtype}:{called_with(_called(module))}"


def facts_of(module: nn.Module, optimizers: list[Optimizer], session: RankSession) -> ModelFacts:
    """What there is to say of a model.

    Args:
        module: As the user has it, wrappers and all.
        optimizers: Those that step its parameters.
        session: This rank.
    """
    notes: list[str] = []
    name, options = _optimizer(optimizers, notes)
    if held_stages(module) is not None:
        setup, given, layout, more = pipeline_facts(module, name)
        return ModelFacts(setup, True, options, None, (), given, "mean", (*notes, *more), **layout)
    inner = inner_model(module)
    inputs = called_with(_called(module))
    fields = {**_strategy(module, inner, optimizers, session, notes), "optimizer": name, "batch": _batch(inputs)}
    known = fields.pop("known")
    recomputed = sorted({plain_class(own).__name__ for own in inner.modules() if is_recomputed(own)})
    units = _units(inner)
    return ModelFacts(
        MemorySetup(**fields, checkpointing=bool(recomputed)),
        known,
        options,
        tuple(sorted(units)) if units is not None else None,
        tuple(recomputed),
        inputs,
        "tokens" if isinstance(inner, loaded(*_GPT)) else "mean",
        tuple(notes),
    )


def _called(module: nn.Module) -> nn.Module:
    """Whose forward is looked at: the model's, which has the names of its arguments, or that of what is compiled."""
    if (stage := first_stage(module)) is not None:
        return stage
    while not isinstance(module, loaded(*_COMPILED)) and module is not (inside := _inside(module)):
        module = inside
    return module


def _inside(module: nn.Module) -> nn.Module:
    wraps = isinstance(module, (DistributedDataParallel, loaded(*_SHARDED)))
    return module.module if wraps else module  # type: ignore[return-value]


def _batch(inputs: list[Any] | None) -> int:
    sizes = [value["shape"][0] for value in inputs or () if isinstance(value, dict) and value["shape"]]
    return max(1, sizes[0]) if sizes else 1


def _optimizer(optimizers: list[Optimizer], notes: list[str]) -> tuple[str, dict[str, Any]]:
    if not optimizers:
        notes.append("There is no optimizer of this model among the variables: Adam is taken.")
        return "adam", {}
    own = getattr(optimizers[0], "optim", optimizers[0])
    kind = type(own)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        notes.append(f"{kind.__name__} is no optimizer of torch's: Adam is taken.")
        return "adam", {}
    if len(optimizers) > 1:
        notes.append(f"Of {len(optimizers)} optimizers the first is taken for all parameters: {kind.__name__}.")
    options = {key: own.defaults[key] for key in _OPTIONS if own.defaults.get(key)}
    name = kind.__name__.lower()
    return WITH_MOMENTUM if name == "sgd" and "momentum" in options else name, options


def _strategy(
    module: nn.Module, inner: nn.Module, optimizers: list[Optimizer], session: RankSession, notes: list[str]
) -> dict[str, Any]:
    world = session.config.world_size
    zero1 = any(type(own).__name__ == "ZeroRedundancyOptimizer" for own in optimizers)
    if isinstance(module, loaded(*_SHARDED)):
        own: Any = module
        mesh = own.mesh
        found = {"strategy": own.strategy.value, "world": mesh.size(), "shard": mesh.size(mesh.ndim - 1)}
        return {**found, "offload": own.cpu_offload.value, "mixed_precision": _computes_in(inner), "known": True}
    if isinstance(module, DistributedDataParallel):
        size = torch.distributed.get_world_size(module.process_group)
        return {"strategy": "optimizer_state" if zero1 else "ddp", "world": size, "shard": size, "known": True}
    parameters: list[Any] = list(inner.parameters())
    meshes = {p.device_mesh for p in parameters if is_dtensor(p)}
    if not meshes:
        notes.append(f"Nothing wraps the model: what is asked for first is full_shard on all {world} ranks.")
        return {"strategy": "full_shard", "world": world, "shard": world, "known": False}
    mesh = max(meshes, key=lambda own: own.size())
    sizes = dict(zip(mesh.mesh_dim_names or map(str, range(mesh.ndim)), mesh.shape, strict=True))
    by_fsdp = _units(inner) is not None
    if "tp" in sizes or len(meshes) > 1 or not by_fsdp:
        notes.append("Layers are cut over ranks, too: what is asked here is about samples alone, with whole layers.")
        rest = math.prod(size for name, size in sizes.items() if name != "tp") if by_fsdp else world
        return {"strategy": "full_shard", "world": rest, "shard": rest, "known": False}
    keeps = _keeps_whole(inner)
    strategy = "hybrid_shard" if mesh.ndim == 2 else "shard_grad_op" if keeps else "full_shard"
    found = {"strategy": strategy, "world": mesh.size(), "shard": mesh.size(mesh.ndim - 1)}
    return {**found, "mixed_precision": _computes_in(inner), "known": True}


def _states(inner: nn.Module) -> list[tuple[nn.Module, Any]]:
    modules: list[Any] = [own for own in inner.modules() if hasattr(own, "_get_fsdp_state")]
    return [(own, own._get_fsdp_state()) for own in modules]


def _units(inner: nn.Module) -> set[str] | None:
    states = _states(inner)
    return {plain_class(own).__name__ for own, _ in states if own is not inner} if states else None


def _computes_in(inner: nn.Module) -> str:
    dtypes = [getattr(getattr(state, "_mp_policy", None), "param_dtype", None) for _, state in _states(inner)]
    dtype = next(filter(None, dtypes), None)
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _keeps_whole(inner: nn.Module) -> bool:
    """Whether units stay whole from forward to backward; the root does so by default, and does not count."""
    states = [state for own, state in _states(inner) if own is not inner]
    groups = [group for state in states for group in torch_api().fsdp_parameter_groups(state)]
    return bool(groups) and all(getattr(group, "post_forward_mesh_info", True) is None for group in groups)
