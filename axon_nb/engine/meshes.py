"""The mesh that this rank's variables hold, for the card of the cluster."""

from __future__ import annotations

from typing import Any

from axon_nb.engine.session import current
from axon_nb.engine.sharded import mesh_type

__all__ = ["mesh_fields"]


def mesh_fields() -> dict[str, Any] | None:
    """Fields of `MeshInfo`; None: there is no mesh.

    Of several, the one that is called ``mesh``, else the one with most ranks, else with most axes.
    """
    kind: Any = mesh_type()
    space = list(current().kernel.shell.user_ns.items())  # a cell may be adding to it
    found: dict[str, Any] = {
        name: value for name, value in space if isinstance(value, kind) and value.ndim and not name.startswith("_")
    }
    if not found:
        return None
    name = max(found, key=lambda own: (own == "mesh", found[own].mesh.numel(), found[own].mesh.ndim))
    mesh = found[name]
    axes = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.mesh.ndim))
    return {
        "name": name,
        "axes": list(axes),
        "shape": list(mesh.mesh.shape),
        "ranks": [int(rank) for rank in mesh.mesh.flatten().tolist()],
    }
