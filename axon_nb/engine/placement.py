"""Placement of tensors: of those on a mesh, and of parameters of axon_nb's tensor-parallel layers.

The layers hold plain tensors, of which each rank of a group has a part. Private hook: torch's computation of a
DTensor's local shape and offset; without it, shards are assumed to be split evenly, as by `torch.chunk`.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from axon_nb.comm.placements import Placed, placed
from axon_nb.engine.sharding import format_placement, loaded_class

_LINEAR = "axon_nb.parallel.tensor.layers"
_BLOCK = ("axon_nb.parallel.tensor.layers", "TensorParallelBlock")
_NORM = ("axon_nb.parallel.tensor.layers", "SequenceParallelNorm")


class LayerSharding(Struct, frozen=True):
    """How a tensor-parallel layer shards one of its parameters."""

    group: Any
    """The ranks that share the layer: a group of `axon_nb.comm`."""
    dim: int | None
    """Dimension that is split into equal parts, in the order of the group's ranks; None: replicated."""


def layer_shardings(modules: Iterable[Any]) -> dict[int, LayerSharding]:
    """Return the sharding of parameters of tensor-parallel layers, by `id`; layers on a single rank are left out."""
    linear = (loaded_class(_LINEAR, "ColumnParallelLinear"), loaded_class(_LINEAR, "RowParallelLinear"))
    block, sequence_norm = loaded_class(*_BLOCK), loaded_class(*_NORM)
    shardings: dict[int, LayerSharding] = {}
    for module in modules:
        if issubclass(type(module), linear):
            dims = module.shard_dims
            parameters = dict(module.named_parameters(recurse=False))
            shardings |= {id(parameters[name]): LayerSharding(module.group, dims.get(name)) for name in parameters}
        elif issubclass(type(module), block):
            replicated = [parameter for norm in (module.norm_1, module.norm_2) for parameter in norm.parameters()]
            shardings |= {id(parameter): LayerSharding(module.attention.group, None) for parameter in replicated}
        elif issubclass(type(module), sequence_norm):
            shardings |= {
                id(parameter): LayerSharding(module.group, None) for parameter in module.parameters(recurse=False)
            }
    return {key: sharding for key, sharding in shardings.items() if sharding.group.size() > 1}


class ShardPlacement(Struct, frozen=True):
    """A tensor on a mesh, seen from one rank; the fields are those of `records.telemetry.Shard`."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    placements: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()
    padding: int = 0


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    found = placed(tensor)
    local: torch.Tensor = tensor if found is None else found.local
    return local


def placement_of(
    tensor: Any,
    *,
    group: Any = None,
    sharded: Any = None,
    layer: LayerSharding | None = None,
    like: Placed | None = None,
) -> ShardPlacement:
    """Return the placement of a tensor.

    Args:
        tensor: Any tensor.
        group: The process group over which a plain tensor is replicated.
        sharded: The DTensor whose unsharded form a plain tensor is.
        layer: How a tensor-parallel layer shards it; the other arguments describe the local part.
        like: How a parameter of the same shape is laid out, of which the tensor is a gradient or a state.
    """
    placement = _local_placement(tensor, group, sharded, like)
    return placement if layer is None else _within_layer(placement, layer)


def _local_placement(tensor: Any, group: Any, sharded: Any, like: Placed | None) -> ShardPlacement:
    if (found := placed(tensor) or like) is not None:
        return _on_mesh(found, found.placements, padded=True)
    if (found := placed(sharded)) is not None:
        from torch.distributed.tensor import Replicate  # loaded, as there is a DTensor; a rank starts without it

        return _on_mesh(found, [Replicate()] * found.mesh.ndim, padded=False)
    shape = tuple(tensor.shape)
    if group is not None:
        coordinates, size = (dist.get_rank(group),), (dist.get_world_size(group),)
        return ShardPlacement(shape, (0,) * len(shape), ("Replicate()",), ("replica",), size, coordinates)
    return ShardPlacement(shape, (0,) * len(shape))


def _within_layer(placement: ShardPlacement, layer: LayerSharding) -> ShardPlacement:
    """Extend the placement of a part by the axis over which its layer is sharded."""
    size, rank = layer.group.size(), layer.group.rank()
    shape, offset, text = list(placement.global_shape), list(placement.offset), "Replicate()"
    if layer.dim is not None:
        text = f"Shard({layer.dim})"
        offset[layer.dim] += rank * shape[layer.dim]
        shape[layer.dim] *= size
    return replace(
        placement,
        global_shape=tuple(shape),
        offset=tuple(offset),
        placements=(*placement.placements, text),
        axes=(*placement.axes, "tp"),
        mesh_shape=(*placement.mesh_shape, size),
        coordinates=(*placement.coordinates, rank),
    )


def _on_mesh(tensor: Placed, placements: Any, *, padded: bool) -> ShardPlacement:
    mesh = tensor.mesh
    offset = _offset(tensor, placements)
    names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    return ShardPlacement(
        tensor.shape,
        offset,
        tuple(format_placement(placement) for placement in placements),
        tuple(names),
        tuple(mesh.shape),
        tuple(mesh.get_coordinate() or ()),
        _padding(tensor, placements) if padded else 0,
    )


@functools.cache
def _offsets() -> Any:
    utils = importlib.import_module("torch.distributed.tensor._utils")
    return getattr(utils, "compute_local_shape_and_global_offset", None)


def _offset(tensor: Placed, placements: Any) -> tuple[int, ...]:
    mesh = tensor.mesh
    if (offsets := _offsets()) is not None:
        _, offset = offsets(torch.Size(tensor.shape), mesh, placements)
        return tuple(int(start) for start in offset)
    offset, shape, coordinates = [0] * len(tensor.shape), list(tensor.shape), mesh.get_coordinate() or ()
    for axis, placement in enumerate(placements):
        if (dim := getattr(placement, "dim", None)) is not None:
            chunk = math.ceil(shape[dim] / mesh.size(axis))
            start = min(chunk * coordinates[axis], shape[dim])
            offset[dim] += start
            shape[dim] = min(chunk, shape[dim] - start)
    return tuple(offset)


def _padding(tensor: Placed, placements: Any) -> int:
    """Return the bytes by which FSDP2 pads this shard to the size of the others; 0 if its storage has no such room."""
    local, shape, padding = tensor.local, list(tensor.shape), 0
    used = local.numel() * local.element_size()
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        shape[dim] = math.ceil(shape[dim] / tensor.mesh.size(axis))
        padding = math.prod(shape) * local.element_size() - used
    return padding if padding > 0 and local.untyped_storage().nbytes() == used + padding else 0
