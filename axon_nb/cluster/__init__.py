"""The notebook side of a cluster: start it, run cells on it, move data, inspect it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["CellHandle", "CellResult", "Cluster", "attach", "current", "restart", "start"]

_HOMES = {
    "CellHandle": "axon_nb.cluster.cells.driver",
    "CellResult": "axon_nb.cluster.cells.result",
    "Cluster": "axon_nb.cluster.cluster",
    "attach": "axon_nb.cluster.session.clusters",
    "current": "axon_nb.cluster.session.current",
    "restart": "axon_nb.cluster.session.clusters",
    "start": "axon_nb.cluster.session.clusters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "current":
        return importlib.import_module("axon_nb.cluster.session.current")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
