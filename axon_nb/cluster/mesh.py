"""Asking ranks for the mesh that they have made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from axon_nb.cluster.client import RankClient
from axon_nb.cluster.waits import ask
from axon_nb.records.mesh import MeshInfo, read_mesh

__all__ = ["ask_mesh"]

_MESH_LIMIT_S = 1.0


def ask_mesh(client: RankClient, ranks: Iterable[int]) -> MeshInfo | None:
    """The mesh of most ranks, of several the one that most have; None: there is none, or no rank answers in time."""
    answers = ask(client, ranks, "axon_mesh", limit_s=_MESH_LIMIT_S)
    found = Counter(read_mesh(answer["mesh"]) for answer in answers.values() if answer.get("mesh"))
    return max(found, key=lambda mesh: (len(mesh.ranks), found[mesh]), default=None)
