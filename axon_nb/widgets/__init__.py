"""Views in a notebook: live while a cell runs, pictures and tables afterwards. Loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axon_nb.lazy import lazy_names

if TYPE_CHECKING:
    from axon_nb.widgets.cell.views import RankStrip
    from axon_nb.widgets.memory.view import MemoryView
    from axon_nb.widgets.shards import ShardsView
    from axon_nb.widgets.timeline.view import TimelineView
    from axon_nb.widgets.watch.view import WatchView

__all__ = ["MemoryView", "RankStrip", "ShardsView", "TimelineView", "WatchView"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "cell.views": "RankStrip",
        "memory.view": "MemoryView",
        "shards": "ShardsView",
        "timeline.view": "TimelineView",
        "watch.view": "WatchView",
    },
)
