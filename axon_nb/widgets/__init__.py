"""Views in a notebook: live while a cell runs, pictures and tables afterwards. Loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axon_nb.widgets.cell.views import RankStrip
    from axon_nb.widgets.memory.view import MemoryView
    from axon_nb.widgets.shards import ShardsView
    from axon_nb.widgets.timeline.view import TimelineView
    from axon_nb.widgets.watch.view import WatchView

__all__ = ["MemoryView", "RankStrip", "ShardsView", "TimelineView", "WatchView"]

_MODULE_OF = {
    "MemoryView": "memory.view",
    "RankStrip": "cell.views",
    "ShardsView": "shards",
    "TimelineView": "timeline.view",
    "WatchView": "watch.view",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, and cache it."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, including those not imported yet."""
    return sorted(__all__)
