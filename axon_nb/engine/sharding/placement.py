"""Where a tensor lies on its mesh. Private hook: torch's computation of a DTensor's local shape and offset.

Where it is missing the offset of a shard is that of an even split, as `torch.chunk` makes it.

Parameters of the tensor-parallel layers written by hand: plain tensors, of which each rank of a group has a part.

Parameters that FSDP2 has made whole for the moment. Private hook: FSDP2's parameter groups.

Where they are missing, such parameters are taken for plain tensors of each rank.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from axon_nb.engine.sharding.sharded import loaded, placement_in_words
from axon_nb.torch_api import torch_api

__all__ = [
    "Cut",
    "Place",
    "cut_parameters",
    "place_of",
    "placed_local",
    "whole_parameters",
]

_LINEAR = "axon_nb.parallel.tensor.linear"
_BLOCK = ("axon_nb.parallel.tensor.blocks", "TensorParallelBlock")
_NORM = ("axon_nb.parallel.tensor.blocks", "SequenceParallelNorm")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a layer holds one of its parameters."""

    group: Any
    """The ranks that share the layer: a group of `axon_nb.comm`."""
    dim: int | None
    """Along which dim the parameter is cut, in equal parts in the order of the group's ranks; None: each has it all."""


def cut_parameters(modules: Iterable[Any]) -> dict[int, Cut]:
    """The parameters that such layers among these modules hold, by `id`; those of layers on one rank are left out."""
    linear = (loaded(_LINEAR, "ColumnParallelLinear"), loaded(_LINEAR, "RowParallelLinear"))
    block, norm = loaded(*_BLOCK), loaded(*_NORM)
    found: dict[int, Cut] = {}
    for module in modules:
        if issubclass(type(module), linear):
            dims = module.shard_dims
            own = dict(module.named_parameters(recurse=False))
            found |= {id(own[name]): Cut(module.group, dims.get(name)) for name in own}
        elif issubclass(type(module), block):
            whole = [parameter for part in (module.norm_1, module.norm_2) for parameter in part.parameters()]
            found |= {id(parameter): Cut(module.attention.group, None) for parameter in whole}
        elif issubclass(type(module), norm):
            found |= {id(parameter): Cut(module.group, None) for parameter in module.parameters(recurse=False)}
    return {key: cut for key, cut in found.items() if cut.group.size() > 1}


_utils: Any = importlib.import_module("torch.distributed.tensor._utils")
_offsets = getattr(_utils, "compute_local_shape_and_global_offset", None)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor on a mesh, seen from one rank; the fields are those of `records.shard.Shard`."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    placements: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()
    padding: int = 0


def placed_local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


def place_of(tensor: Any, *, group: Any = None, sharded: Any = None, cut: Cut | None = None) -> Place:
    """Where a tensor lies.

    Args:
        tensor: Any tensor.
        group: The process group on which a plain tensor is kept equal.
        sharded: The DTensor of which a plain tensor is the whole.
        cut: How a tensor-parallel layer holds it; all else is about the part that is here.
    """
    place = _place_here(tensor, group, sharded)
    return place if cut is None else _within_layer(place, cut)


def _place_here(tensor: Any, group: Any, sharded: Any) -> Place:
    if isinstance(tensor, DTensor):
        return _on_mesh(tensor, tensor.placements, padded=True)
    if isinstance(sharded, DTensor):
        return _on_mesh(sharded, [Replicate()] * sharded.device_mesh.ndim, padded=False)
    shape = tuple(tensor.shape)
    if group is not None:
        place, size = (dist.get_rank(group),), (dist.get_world_size(group),)
        return Place(shape, (0,) * len(shape), ("Replicate()",), ("replica",), size, place)
    return Place(shape, (0,) * len(shape))


def _within_layer(place: Place, cut: Cut) -> Place:
    """Where a part lies in what a layer has cut over its group."""
    count, own = cut.group.size(), cut.group.rank()
    shape, offset, words = list(place.global_shape), list(place.offset), "Replicate()"
    if cut.dim is not None:
        words = f"Shard({cut.dim})"
        offset[cut.dim] += own * shape[cut.dim]
        shape[cut.dim] *= count
    return replace(
        place,
        global_shape=tuple(shape),
        offset=tuple(offset),
        placements=(*place.placements, words),
        axes=(*place.axes, "tp"),
        mesh_shape=(*place.mesh_shape, count),
        coordinates=(*place.coordinates, own),
    )


def _on_mesh(tensor: Any, placements: Any, *, padded: bool) -> Place:
    mesh = tensor.device_mesh
    shape = tuple(tensor.shape)
    offset = _offset(tensor, placements)
    names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    return Place(
        shape,
        offset,
        tuple(placement_in_words(placement) for placement in placements),
        tuple(names),
        tuple(mesh.shape),
        tuple(mesh.get_coordinate() or ()),
        _padding(tensor, placements) if padded else 0,
    )


def _offset(tensor: Any, placements: Any) -> tuple[int, ...]:
    mesh = tensor.device_mesh
    if _offsets is not None:
        _, offset = _offsets(tensor.shape, mesh, placements)
        return tuple(int(start) for start in offset)
    offset, shape, place = [0] * tensor.ndim, list(tensor.shape), mesh.get_coordinate() or ()
    for axis, placement in enumerate(placements):
        if (dim := getattr(placement, "dim", None)) is not None:
            chunk = math.ceil(shape[dim] / mesh.size(axis))
            start = min(chunk * place[axis], shape[dim])
            offset[dim] += start
            shape[dim] = min(chunk, shape[dim] - start)
    return tuple(offset)


def _padding(tensor: Any, placements: Any) -> int:
    """Bytes by which FSDP2 makes this shard as large as the others: there where the storage has room for them."""
    local, shape, padding = tensor._local_tensor, list(tensor.shape), 0
    used = local.numel() * local.element_size()
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        shape[dim] = math.ceil(shape[dim] / tensor.device_mesh.size(axis))
        padding = math.prod(shape) * local.element_size() - used
    return padding if padding > 0 and local.untyped_storage().nbytes() == used + padding else 0


def _state_type() -> Any:
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    return getattr(module, "ShardedState", None)


def whole_parameters(modules: Iterable[Any]) -> dict[int, Any]:
    """The sharded form (a DTensor) of each parameter that is whole now, by the `id` of the whole one.

    Args:
        modules: Modules among which those that FSDP2 manages are looked for.
    """
    state_type, found = _state_type(), {}
    if state_type is None:
        return {}
    for module in modules:
        if not hasattr(module, "_get_fsdp_state"):
            continue
        for group in torch_api().fsdp_parameter_groups(module._get_fsdp_state()):
            for parameter in getattr(group, "fsdp_params", ()):
                if getattr(parameter, "sharded_state", None) is state_type.UNSHARDED:
                    found[id(parameter.unsharded_param)] = parameter.sharded_param
    return found
