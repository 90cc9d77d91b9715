"""Placements of tensors on meshes of ranks: of DTensors, and of plain tensors that are declared or typed.

Views, the search for lost shards and checkpoints ask `placed`, which asks each of `_READERS`. A library that shards
plain tensors in its own way gets an entry there, or declares placements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.utils.weak import WeakTensorKeyDictionary

from axon_nb.errors import UsageError
from axon_nb.records.hooks import missing_hooks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_declared: Any = WeakTensorKeyDictionary()
"""Shape, mesh and placements of declared tensors, by tensor."""
_meshes: dict[tuple[Any, ...], Any] = {}
"""Meshes over the groups of `spmd_types`' axes, by device and groups."""


class Placed(Struct, frozen=True):
    """A tensor that is laid out over the ranks of a mesh, seen from one of them."""

    local: torch.Tensor
    """What this rank holds."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    mesh: DeviceMesh
    placements: tuple[Any, ...]
    """torch's placements, one for each axis of the mesh."""

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds all of it."""
        return all(placement.is_replicate() for placement in self.placements)

    def as_dtensor(self, local: torch.Tensor) -> DTensor:
        """Return a tensor that is laid out likewise, as a DTensor over the same memory; no rank communicates.

        Args:
            local: This rank's part of it.
        """
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local.detach(), self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )


def placed(tensor: Any) -> Placed | None:
    """Return how a tensor is laid out over ranks; None if nothing says so. Calls nothing, so any thread may ask."""
    return next((found for read in _READERS if (found := read(tensor)) is not None), None)


def declare_placements(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Declare that a plain tensor is this rank's part of a larger one, for models that you shard by hand.

    `%shards` then draws it, a repair names what died with a rank, `Checkpoints` saves it as a part of the whole, which
    another number of ranks can load, and `clip_grad_norm` takes the norm of the whole. Gradients and optimizer states
    of its shape are laid out likewise. Nothing is computed or communicated, and the tensor stays a plain one:
    communication in the forward is yours, as before.

        self.weight = declare_placements(nn.Parameter(torch.empty(rows // size, columns)), mesh, [Shard(0)])

    Args:
        tensor: This rank's part. The declaration belongs to this object: declare a copy or a new parameter again.
        mesh: The ranks.
        placements: torch's `Shard(dim)` or `Replicate()` for each axis of the mesh.
        shape: Shape of the whole tensor, of which each rank holds what `torch.chunk` gives it; None: all parts have
            the shape of this one.

    Returns:
        The tensor.

    Raises:
        UsageError: the placements do not fit the mesh or the tensor; or it is a DTensor, which knows its own.
    """
    from torch.distributed.tensor import Replicate, Shard

    if _of_dtensor(tensor) is not None:
        raise UsageError("tensor is a DTensor, which has its own placements; declare those of plain tensors only.")
    kinds = tuple(placements)
    if len(kinds) != mesh.ndim:
        raise UsageError(f"placements must have one entry for each of the {mesh.ndim} axes of the mesh; got {kinds}.")
    if (coordinates := mesh.get_coordinate()) is None:
        raise UsageError("this rank is not in the mesh; declare placements on the ranks of the mesh only.")
    for kind in kinds:
        if not (type(kind) is Replicate or (type(kind) is Shard and -tensor.ndim <= kind.dim < tensor.ndim)):
            raise UsageError(
                f"placements must be Replicate(), or Shard(dim) with a dimension of the tensor, which has "
                f"{tensor.ndim}; got {kind!r}."
            )
    # A dimension may count from the end, as in torch.
    kinds = tuple(Shard(kind.dim % tensor.ndim) if type(kind) is Shard else kind for kind in kinds)
    whole, part = list(tensor.shape), list(tensor.shape)
    if shape is None:
        for kind, size in zip(kinds, mesh.shape, strict=True):
            if type(kind) is Shard:
                whole[kind.dim] *= size
    else:
        whole = list(shape)
        part = part_shape(whole, kinds, mesh.shape, coordinates)
    if part != list(tensor.shape):
        raise UsageError(
            f"shape {tuple(whole)} with {kinds} gives this rank a part of shape {tuple(part)}, but the tensor has "
            f"{tuple(tensor.shape)}."
        )
    _declared[tensor] = (tuple(whole), mesh, kinds)
    return tensor


def part_shape(shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], at: Sequence[int]) -> list[int]:
    """Return the shape of a rank's part, as `torch.chunk` splits."""
    part = list(shape)
    for kind, size, index in zip(placements, sizes, at, strict=True):
        if kind.is_shard() and kind.dim < len(part):
            chunk = math.ceil(part[kind.dim] / size)
            part[kind.dim] = max(0, min(chunk, part[kind.dim] - index * chunk))
    return part


def _of_dtensor(tensor: Any) -> Placed | None:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or not issubclass(type(tensor), kind):
        return None
    return Placed(tensor._local_tensor, tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))


def _of_declared(tensor: Any) -> Placed | None:
    # type() instead of isinstance: lazy proxies answer the latter with side effects.
    if not _declared or not issubclass(type(tensor), torch.Tensor) or (known := _declared.get(tensor)) is None:
        return None
    return Placed(tensor, *known)


def _of_spmd_types(tensor: Any) -> Placed | None:
    """Read the types that `spmd_types` keeps on plain tensors: R and I are replicas, P a partial sum.

    V says that ranks differ, and the partition spec of which dimension they hold parts. Without one, nobody knows what
    the whole would be.
    """
    spmd = sys.modules.get("spmd_types")
    if spmd is None or not issubclass(type(tensor), torch.Tensor) or not (kinds := spmd.get_local_type(tensor)):
        return None
    from torch.distributed.tensor import Partial, Replicate, Shard

    axes = sorted(kinds, key=lambda axis: axis.layout.stride, reverse=True)
    spec = [entry if isinstance(entry, tuple) else (entry,) for entry in spmd.get_partition_spec(tensor) or ()]
    # Parts of one dimension over several axes nest in the order of the spec; placements nest in that of the mesh.
    if any(list(entry) != [axis for axis in axes if axis in entry] for entry in spec if entry != (None,)):
        return None
    dims = {axis: dim for dim, entry in enumerate(spec) for axis in entry}
    placements: list[Any] = []
    shape = list(tensor.shape)
    for axis in axes:
        if axis in dims:
            shape[dims[axis]] *= axis.size()
            placements.append(Shard(dims[axis]))
        elif kinds[axis] is spmd.V and axis.size() > 1:
            return None
        else:
            placements.append(Partial() if kinds[axis] is spmd.P else Replicate())
    mesh = _mesh_of(tuple(axes), tensor.device.type)
    return None if mesh is None else Placed(tensor, tuple(shape), mesh, tuple(placements))


def _mesh_of(axes: tuple[Any, ...], device: str) -> DeviceMesh | None:
    """Return a mesh with these axes, over the groups that the process has; None if one has no group."""
    from torch.distributed.device_mesh import DeviceMesh

    if missing_hooks("comm.known_groups"):
        return None
    groups = list(dist.distributed_c10d._world.pg_map)
    spmd_axis = type(axes[0])
    found: list[Any] = [next((group for group in groups if spmd_axis.of(group) == axis), None) for axis in axes]
    if None in found:
        return None
    key = (device, *map(id, found))
    if key not in _meshes:
        ranks = torch.zeros((), dtype=torch.int, device="cpu")
        for group in found:
            members = torch.tensor(dist.get_process_group_ranks(group), dtype=torch.int, device="cpu")
            ranks = ranks[..., None] + members - dist.get_rank()
        names = tuple(min(axis.names, default=f"axis{place}") for place, axis in enumerate(axes))
        ranks = ranks + dist.get_rank()
        # The groups are kept with the mesh, so their ids stay theirs.
        _meshes[key] = DeviceMesh.from_group(found, device, mesh=ranks, mesh_dim_names=names), found
    mesh: DeviceMesh = _meshes[key][0]
    return mesh


_READERS = (_of_dtensor, _of_declared, _of_spmd_types)
