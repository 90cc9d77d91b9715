"""Ranks arranged along named axes: data, tensor, pipeline, or whatever they are called."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axon_nb.comm.errors import CommError, WorldClosed
from axon_nb.comm.group import ProcessGroup, resolve
from axon_nb.comm.kinds import Backend

__all__ = ["axis_group", "coordinates", "make_mesh"]


def make_mesh(*, device: str | None = None, **axes: int) -> DeviceMesh:
    """A mesh of all ranks with these axes, the last one varying fastest; collective.

    ``make_mesh(dp=2, tp=4)`` puts ranks 0-3 into one tensor-parallel group and 4-7 into the other.

    Args:
        device: ``cpu`` or ``cuda``; None: what the world's backend computes on.
        **axes: Size of each axis, in order; one may be -1: what is left.

    Raises:
        CommError: the sizes do not multiply to the number of ranks.
        WorldClosed: there is no world.
    """
    if not dist.is_initialized():
        raise WorldClosed("There is no world to arrange: `World.init()` comes first.")
    sizes = _resolved(axes, dist.get_world_size())
    if device is None:
        on_gpu = resolve(None).backend is Backend.NCCL or torch.cuda.is_available()
        device = "cuda" if on_gpu else "cpu"
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _resolved(axes: dict[str, int], world_size: int) -> dict[str, int]:
    if not axes:
        raise CommError("A mesh has at least one axis: make_mesh(dp=-1) has all ranks in one.")
    for name, size in axes.items():
        if size != -1 and size < 1:
            raise CommError(f"{name}={size}: an axis has at least 1 rank, or -1 for what is left.")
    open_axes = [name for name, size in axes.items() if size == -1]
    if len(open_axes) > 1:
        raise CommError(f"{' and '.join(open_axes)} are both -1: only one axis can take what is left.")
    product = math.prod(size for size in axes.values() if size != -1)
    shown = " x ".join(f"{name}={size}" for name, size in axes.items())
    if open_axes:
        if world_size % product:
            raise CommError(
                f"{shown}: {world_size} ranks cannot be divided by {product}, so {open_axes[0]} has no size."
            )
        return {name: world_size // product if size == -1 else size for name, size in axes.items()}
    if product != world_size:
        raise CommError(f"{shown} makes {product} ranks, and the world has {world_size}: one axis may be -1.")
    return dict(axes)


def axis_group(mesh: DeviceMesh, axis: str) -> ProcessGroup:
    """The ranks that share all coordinates with this one but the one on `axis`.

    Raises:
        CommError: the mesh has no such axis.
    """
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise CommError(f"axis {axis!r}: the mesh has {', '.join(names) or 'no named axes'}.")
    return ProcessGroup.wrap(mesh.get_group(axis))


def coordinates(mesh: DeviceMesh) -> dict[str, int]:
    """Where this rank is, by axis.

    Raises:
        CommError: it is not in the mesh.
    """
    place = mesh.get_coordinate()
    if place is None:
        raise CommError("This rank is not in the mesh.")
    return dict(zip(mesh.mesh_dim_names or (), place, strict=True))
