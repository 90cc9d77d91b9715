"""What model states take on this rank by formula, for the bars beside the measured ones."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch.optim import Optimizer

from axon_nb.engine.session import RankSession
from axon_nb.engine.sharding.sharded import is_dtensor
from axon_nb.parallel.data.sharded_model import ShardedModel
from axon_nb.parallel.memory import FSDPMemoryStats, model_states
from axon_nb.parallel.optimizer_kind import OptimizerKind
from axon_nb.parallel.strategies import ShardingStrategy
from axon_nb.records.memory import MemoryUse

__all__ = ["estimate"]

_NO_FORMULA = "No estimate: there is a formula for whole models, DDP, FSDP2 and ZeRO-1."


def estimate(
    modules: list[torch.nn.Module], optimizers: list[Optimizer], session: RankSession
) -> tuple[MemoryUse | None, str]:
    """Parameters, gradients and optimizer state between steps, and why there is no number of them, or no better one.

    This is the one place that decides where estimates come from.

    Args:
        modules: What is trained.
        optimizers: What trains it; empty: Adam is taken.
        session: The rank.
    """
    kind = None if not optimizers else OptimizerKind(type(_own(optimizers[0])), _options(optimizers[0]))
    try:
        zero1 = next((own for own in optimizers if type(own).__name__ == "ZeroRedundancyOptimizer"), None)
        parts = [_of_module(module, kind, zero1) for module in modules]
    except Exception as error:  # an optimizer of the user's own, say, that cannot be tried
        return None, f"No estimate: {type(error).__name__}: {error}"
    if not parts or None in parts:
        return None, _NO_FORMULA
    found = [part for part in parts if part is not None]
    sizes = {
        "parameters": sum(part.param_memory_bytes for part in found),
        "gradients": sum(part.grad_memory_bytes for part in found),
        "optimizer": sum(part.optim_memory_bytes for part in found),
    }
    why = "" if optimizers else "The estimate is for Adam: there is no optimizer of this model among the variables."
    return MemoryUse(session.config.rank, time.monotonic_ns(), "estimate", sizes), why


def _own(optimizer: Optimizer) -> Optimizer:
    own: Optimizer = getattr(optimizer, "optim", optimizer)
    return own


def _options(optimizer: Optimizer) -> dict[str, object]:
    defaults = _own(optimizer).defaults
    return {name: defaults[name] for name in ("amsgrad", "momentum", "centered") if name in defaults}


def _of_module(module: torch.nn.Module, kind: OptimizerKind | None, zero1: Any) -> FSDPMemoryStats | None:
    if isinstance(module, ShardedModel):  # it knows its shapes from before it was sharded
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
    """Whether a parameter is split along its first dim over the last axis of its mesh alone, as FSDP2 does."""
    if not is_dtensor(parameter):
        return False
    *copies, shard = parameter.placements
    return all(place.is_replicate() for place in copies) and bool(shard.is_shard(0))
