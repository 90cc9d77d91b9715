"""Estimates model states on this rank by formula, for the bars beside the measured ones."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch.optim import Optimizer

from axon_nb.engine.session import RankSession
from axon_nb.engine.sharding.sharded import is_dtensor, unreplicated_reason
from axon_nb.parallel.data.sharded_model import ShardedModel
from axon_nb.parallel.memory import FSDPMemoryStats, model_states
from axon_nb.parallel.optimizer_kind import OptimizerKind
from axon_nb.parallel.strategies import ShardingStrategy
from axon_nb.records.memory import MemoryUse

_NO_FORMULA = "No estimate: formulas exist only for unsharded models, DDP, FSDP2 and ZeRO-1."


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
    kind = _kind(optimizers)
    try:
        zero1 = next((item for item in optimizers if type(item).__name__ == "ZeroRedundancyOptimizer"), None)
        parts = [_of_module(module, kind, zero1) for module in modules]
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


def _inner_optimizer(optimizer: Optimizer) -> Optimizer:
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def _options(optimizer: Optimizer) -> dict[str, object]:
    defaults = _inner_optimizer(optimizer).defaults
    return {name: defaults[name] for name in ("amsgrad", "momentum", "centered") if name in defaults}


def _of_module(module: torch.nn.Module, kind: OptimizerKind | None, zero1: Any) -> FSDPMemoryStats | None:
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
