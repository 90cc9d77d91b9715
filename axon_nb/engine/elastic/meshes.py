"""Device meshes of all ranks in a world of another size: they stay the same objects."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from axon_nb.engine.live_objects import objects_of
from axon_nb.engine.sharding.sharded import device_mesh_type


def is_world_mesh(mesh: Any, size: int) -> bool:
    """Whether a mesh has one axis with all ranks of a world of `size` ranks."""
    return bool(mesh.ndim == 1 and mesh.mesh.tolist() == list(range(size)))


def world_mesh(device_type: str, names: tuple[str, ...] | None) -> Any:
    """Return a mesh of all ranks on one axis."""
    return device_mesh_type().from_group(dist.group.WORLD, device_type, mesh_dim_names=names)  # type: ignore[attr-defined]


def resize_meshes(old_size: int) -> None:
    """Give every mesh of all `old_size` ranks on one axis the ranks of the world."""
    for mesh in objects_of({device_mesh_type()}):
        if is_world_mesh(mesh, old_size):
            fresh = world_mesh(mesh.device_type, mesh.mesh_dim_names)
            vars(mesh).clear()
            vars(mesh).update(vars(fresh))
