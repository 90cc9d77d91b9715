"""Arrange ranks along named axes: data, tensor, pipeline, or any others."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axon_nb.comm.errors import WorldClosedError
from axon_nb.comm.group import ProcessGroup, rank_device, resolve
from axon_nb.errors import UsageError


def make_mesh(*, device: str | None = None, **axes: int) -> DeviceMesh:
    """Create a mesh of all ranks with these axes, the last one varying fastest. Collective.

    ``make_mesh(dp=2, tp=4)`` puts ranks 0-3 into one tensor-parallel group and 4-7 into the other.

    Args:
        device: ``cpu`` or ``cuda``; None: where the ranks compute.
        **axes: Size of each axis, in order; one may be -1 and gets the remaining ranks.

    Raises:
        UsageError: the product of the sizes is not the number of ranks.
        WorldClosedError: no world is initialized.
    """
    if not dist.is_initialized():
        raise WorldClosedError("No world is initialized: call `World.init()` first.")
    sizes = _resolve_sizes(axes, dist.get_world_size())
    return init_device_mesh(
        device or rank_device(resolve(None)).type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )


def _resolve_sizes(axes: dict[str, int], world_size: int) -> dict[str, int]:
    if not axes:
        raise UsageError("A mesh needs at least one axis; make_mesh(dp=-1) puts all ranks on one.")
    for name, size in axes.items():
        if size != -1 and size < 1:
            raise UsageError(f"{name} must be at least 1, or -1 for the remaining ranks; got {size}.")
    open_axes = [name for name, size in axes.items() if size == -1]
    if len(open_axes) > 1:
        raise UsageError(f"Only one axis can be -1; got {' and '.join(open_axes)}.")
    product = math.prod(size for size in axes.values() if size != -1)
    shown = " x ".join(f"{name}={size}" for name, size in axes.items())
    if open_axes:
        if world_size % product:
            raise UsageError(
                f"{shown}: {world_size} ranks are not divisible by {product}, so {open_axes[0]} has no valid size."
            )
        return {name: world_size // product if size == -1 else size for name, size in axes.items()}
    if product != world_size:
        raise UsageError(f"{shown} needs {product} ranks, but the world has {world_size}; one axis may be -1.")
    return dict(axes)


def axis_group(mesh: DeviceMesh, axis: str) -> ProcessGroup:
    """Return the group of ranks that differ from this one only in their coordinate on `axis`.

    Raises:
        UsageError: the mesh has no such axis.
    """
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise UsageError(f"The mesh has no axis {axis!r}; it has {', '.join(names) or 'no named axes'}.")
    return ProcessGroup.wrap(mesh.get_group(axis))


def coordinates(mesh: DeviceMesh) -> dict[str, int]:
    """Return this rank's coordinate on each axis.

    Raises:
        UsageError: this rank is not in the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError("This rank is not in the mesh.")
    return dict(zip(mesh.mesh_dim_names or (), coordinate, strict=True))
