"""What FSDP works on: which submodules are gathered as a unit, and the mesh of a strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from axon_nb.comm.errors import CommError
from axon_nb.comm.group import GroupLike, resolve
from axon_nb.comm.kinds import Backend
from axon_nb.parallel.activation_checkpoint import ModuleKinds, matches
from axon_nb.parallel.strategies import ShardingStrategy

__all__ = ["Wrap", "device_of", "make_units", "mesh_of"]

Wrap = ModuleKinds | int | None
"""Classes, a function that is asked about each module, a least number of parameters, or None."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""They have no forward of their own, before which a unit could be gathered."""


def make_units(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """The submodules that are units of their own, inner ones first; the model itself is one besides.

    A submodule that shares a parameter with modules outside of it, such as an embedding with the output layer, is none:
    the parameter is gathered with the unit that both are in.

    Args:
        model: Whose submodules.
        wrap: What `FSDP` takes; None: the direct children that have parameters.

    Raises:
        CommError: a least number of parameters below 1.
    """
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))

    def is_whole(unit: nn.Module) -> bool:
        inside = {id(module) for module in unit.modules()}
        return all(owners[id(parameter)] <= inside for parameter in unit.parameters())

    return [unit for unit in _meant(model, wrap) if is_whole(unit)]


def _meant(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    if wrap is None:
        return [child for child in _children(model) if any(True for _ in child.parameters())]
    if isinstance(wrap, int):
        if wrap < 1:
            raise CommError(f"wrap={wrap}: a unit has at least 1 parameter.")
        return _by_size(model, wrap)
    inner = [module for module in reversed(list(model.modules())) if module is not model]
    return [module for module in inner if matches(module, wrap) and not isinstance(module, _CONTAINERS)]


def _children(module: nn.Module) -> list[nn.Module]:
    found = []
    for child in module.children():
        found += _children(child) if isinstance(child, _CONTAINERS) else [child]
    return found


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Units of at least so many parameters that no inner unit has."""
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


def mesh_of(group: GroupLike | Any, mesh: DeviceMesh | None, strategy: ShardingStrategy) -> DeviceMesh:
    """The mesh given, or the one that a strategy has on the ranks of a group.

    Raises:
        CommError: a mesh that does not fit the strategy; a group besides; HYBRID_SHARD without a mesh of two axes.
        NotInGroup: this rank is no member of the group.
    """
    if mesh is not None:
        if group is not None:
            raise CommError("group and mesh: the mesh says already which ranks take part; give one of them.")
        return _checked(mesh, strategy)
    own = resolve(group)
    device = "cuda" if own.backend is Backend.NCCL or torch.cuda.is_available() else "cpu"
    if strategy is ShardingStrategy.HYBRID_SHARD:
        raise CommError("HYBRID_SHARD needs a mesh of (copies, shards): make_mesh(replicate=2, shard=-1).")
    if strategy is ShardingStrategy.NO_SHARD:
        # Every rank a copy, each "sharded" over itself alone.
        return DeviceMesh(device, torch.tensor(own.ranks).view(-1, 1), mesh_dim_names=("replicate", "shard"))
    return DeviceMesh.from_group(own.torch_group, device, mesh_dim_names=("shard",))


def _checked(mesh: DeviceMesh, strategy: ShardingStrategy) -> DeviceMesh:
    wanted = 2 if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD) else 1
    if mesh.ndim != wanted:
        raise CommError(f"{strategy.name} on a mesh of {mesh.ndim} dimensions: it takes {wanted}.")
    if strategy is ShardingStrategy.NO_SHARD and mesh.size(1) != 1:
        raise CommError(f"NO_SHARD on a mesh of shape {tuple(mesh.shape)}: its second dimension is 1.")
    return mesh


def device_of(mesh: DeviceMesh) -> torch.device:
    """What this rank computes on."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
