"""The notebook side of a cluster: start it, run cells on it, move data, inspect it."""

from __future__ import annotations

from axon_nb.lazy import lazy_names

__all__ = ["CellHandle", "CellResult", "Cluster", "attach", "current", "restart", "start"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "cells.driver": "CellHandle",
        "cells.result": "CellResult",
        "cluster": "Cluster",
        "session.clusters": "attach restart start",
        "session.current": "current",
    },
)
