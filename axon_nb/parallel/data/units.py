"""FSDP units and meshes: which submodules are gathered together, and the mesh of a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from axon_nb.comm.group import GroupLike, rank_device, resolve
from axon_nb.errors import UsageError
from axon_nb.parallel.activation_checkpoint import ModuleKinds, matches
from axon_nb.parallel.data.blocks import named_blocks, repeated_blocks
from axon_nb.parallel.strategies import ShardingStrategy

Wrap = ModuleKinds | int | None
"""Classes, a function called with each module, a minimum number of parameters, or None."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward, before which a unit could be gathered."""


def make_units(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """Return the submodules that are units of their own, inner ones first. The model itself is another unit.

    A submodule that shares a parameter with modules outside of it, such as an embedding with the output layer, is not a
    unit: the parameter is gathered with the unit that contains both.

    Args:
        model: The model whose submodules are considered.
        wrap: The same as in `FSDP`.

    Raises:
        UsageError: the minimum number of parameters is below 1.
    """
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))

    def is_whole(unit: nn.Module) -> bool:
        inside = {id(module) for module in unit.modules()}
        return all(owners[id(parameter)] <= inside for parameter in unit.parameters())

    return [unit for unit in _select(model, wrap) if is_whole(unit)]


def describe_units(units: Iterable[nn.Module]) -> str:
    """Describe units by class and number, and how to choose others."""
    kinds = Counter(type(unit).__name__ for unit in units)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    what = f"{shown}, and one of all other parameters" if kinds else "the whole model is one"
    return f"FSDP units: {what}. To choose others, give wrap=."


def _select(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    if wrap is None:
        return named_blocks(model) or _children_or_blocks(model)
    if isinstance(wrap, int):
        if wrap < 1:
            raise UsageError(f"wrap must be at least 1 parameter; got {wrap}.")
        return _by_size(model, wrap)
    inner = [module for module in reversed(list(model.modules())) if module is not model]
    return [module for module in inner if matches(module, wrap) and not isinstance(module, _CONTAINERS)]


def _children_or_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the direct children that have parameters; instead of a child, the repeated blocks inside it."""
    blocks = repeated_blocks(model)
    units: list[nn.Module] = []
    for child in _children(model):
        inside = set(map(id, child.modules()))
        whole = [child] if any(True for _ in child.parameters()) else []
        units += [block for block in blocks if id(block) in inside] or whole
    return units


def _children(module: nn.Module) -> list[nn.Module]:
    children = []
    for child in module.children():
        children += _children(child) if isinstance(child, _CONTAINERS) else [child]
    return children


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return units of at least `least` parameters that are not in an inner unit."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(visit(child) for child in module.children())
        if module is not model and left >= least and not isinstance(module, _CONTAINERS):
            units.append(module)
            return 0
        return left

    visit(model)
    return units


def resolve_mesh(
    group: GroupLike | Any, mesh: DeviceMesh | None, strategy: ShardingStrategy, model: nn.Module
) -> DeviceMesh:
    """Return the given mesh, or create the one that the strategy needs on the ranks of a group.

    Raises:
        UsageError: the mesh does not fit the strategy, a group is given as well, or HYBRID_SHARD has no mesh.
        NotInGroupError: this rank is not a member of the group.
    """
    if mesh is not None:
        if group is not None:
            raise UsageError("Pass either group or mesh, not both: the mesh already defines the ranks.")
        return _check_mesh(mesh, strategy)
    resolved = resolve(group)
    device = "cuda" if any(parameter.is_cuda for parameter in model.parameters()) else rank_device(resolved).type
    if strategy is ShardingStrategy.HYBRID_SHARD:
        raise UsageError("HYBRID_SHARD needs a mesh of (replicas, shards), such as make_mesh(replicate=2, shard=-1).")
    if strategy is ShardingStrategy.NO_SHARD:
        # Each rank is a replica, "sharded" over itself alone.
        return DeviceMesh(
            device, torch.tensor(resolved.ranks, device="cpu").view(-1, 1), mesh_dim_names=("replicate", "shard")
        )
    return DeviceMesh.from_group(resolved.torch_group, device, mesh_dim_names=("shard",))


def _check_mesh(mesh: DeviceMesh, strategy: ShardingStrategy) -> DeviceMesh:
    wanted = 2 if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD) else 1
    if mesh.ndim != wanted:
        raise UsageError(f"{strategy.name} needs a {wanted}-D mesh; got a {mesh.ndim}-D one.")
    if strategy is ShardingStrategy.NO_SHARD and mesh.size(1) != 1:
        raise UsageError(f"NO_SHARD needs a mesh whose second dimension is 1; got shape {tuple(mesh.shape)}.")
    return mesh


def local_device(mesh: DeviceMesh) -> torch.device:
    """Return this rank's compute device."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
