"""The ranks of a plan along the axes of a mesh, from what a user gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from axon_nb.plan.asked_numbers import whole_number
from axon_nb.plan.errors import PlanError

__all__ = ["AXES", "OF_ONE_AXIS", "STRATEGIES", "one_of", "resolved_mesh"]

AXES = ("pp", "replicate", "dp", "shard", "tp")
"""In this order, the last one varying fastest."""
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "optimizer_state", "ddp")
"""Those of `ShardingStrategy`, and torch's DistributedDataParallel."""
OF_ONE_AXIS = tuple(name for name in STRATEGIES if name != "hybrid_shard")
"""Those that deal samples out over one axis, dp."""
_HYBRID = {"replicate", "shard"}


def one_of(name: str, given: Any, choices: Sequence[str]) -> str:
    """One of some names.

    Raises:
        PlanError: it is none of them.
    """
    if given not in choices:
        raise PlanError(f"{name}={given!r}: it is one of {', '.join(choices)}.")
    return str(given)


def resolved_mesh(world: Any, mesh: Any, strategy: str) -> dict[str, int]:
    """The axes of a plan, and their sizes.

    Args:
        world: Number of ranks; None: as the mesh has.
        mesh: Size of each axis, or a `DeviceMesh` with named axes; None: one axis dp, over all ranks.
        strategy: What is sharded, one of `STRATEGIES`.

    Raises:
        PlanError: the sizes do not fit together, or an axis is unknown or missing.
    """
    one_of("strategy", strategy, STRATEGIES)
    if world is not None:
        world = whole_number("world", world, what="ranks")
    if mesh is None or (isinstance(mesh, Mapping) and not mesh):
        if world is None:
            raise PlanError("how many ranks? Give world=8, or mesh={'dp': 4, 'tp': 2}.")
        if strategy == "hybrid_shard":
            raise PlanError("hybrid_shard needs to know a node's ranks: mesh={'replicate': 2, 'shard': 8}.")
        return {"dp": world}
    axes = {axis: whole_number(str(axis), size, what="ranks") for axis, size in _sizes(mesh).items()}
    product = math.prod(axes.values())
    if world not in (None, product):
        shown = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        raise PlanError(f"{shown} makes {product} ranks, and world={world}: leave one of the two away.")
    _check_strategy(axes, strategy)
    return dict(sorted(axes.items(), key=lambda item: AXES.index(item[0])))


def _sizes(mesh: Any) -> Mapping[str, Any]:
    names = getattr(mesh, "mesh_dim_names", None)
    sizes = dict(zip(names, mesh.shape, strict=True)) if names else mesh
    if not isinstance(sizes, Mapping):
        raise PlanError(f"mesh={mesh!r}: it is the number of ranks by axis, such as {{'dp': 4, 'tp': 2}}.")
    for axis in sizes:
        if axis not in AXES:
            raise PlanError(f"axis {axis!r}: a mesh has {', '.join(AXES)}.")
    return sizes


def _check_strategy(axes: Mapping[str, int], strategy: str) -> None:
    if strategy != "hybrid_shard":
        if _HYBRID & axes.keys():
            raise PlanError(f"{strategy} on {axes}: its axis is dp; replicate and shard are those of hybrid_shard.")
    elif not axes.keys() >= _HYBRID or "dp" in axes:
        raise PlanError(f"hybrid_shard on {axes}: its axes are replicate and shard, {{'replicate': 2, 'shard': 8}}.")
    elif "pp" in axes:
        raise PlanError("hybrid_shard with pp: a pipeline's stages are sharded over one axis, dp.")
