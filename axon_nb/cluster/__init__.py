"""The notebook's side of a cluster: start it, run cells on it, move data, see how it is."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["CellHandle", "CellResult", "Cluster", "attach", "current", "restart", "start"]

_HOMES = {
    "CellHandle": "axon_nb.cluster.handle",
    "CellResult": "axon_nb.cluster.result",
    "Cluster": "axon_nb.cluster.cluster",
    "attach": "axon_nb.cluster.startup",
    "current": "axon_nb.cluster.current",
    "restart": "axon_nb.cluster.startup",
    "start": "axon_nb.cluster.startup",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "current":
        return importlib.import_module("axon_nb.cluster.current")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
