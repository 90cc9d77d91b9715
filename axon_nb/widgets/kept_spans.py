"""The spans of one cell that is over, to be shown again: read as a feed and its store are, and never changed."""

from __future__ import annotations

from axon_nb.cluster.span_table import SpanTable

__all__ = ["KeptSpans"]


class KeptSpans:
    """Stands for a `SpanFeed` and its `SpanStore` where nothing new comes.

    Args:
        table: The spans of the cell.
        cell: Its name, and its start and end in nanoseconds of the notebook's monotonic clock.
    """

    def __init__(self, table: SpanTable, cell: tuple[str, int, int]) -> None:
        self._table = table
        self.last_cell = cell
        """As `SpanStore.last_cell`: what a page shows by itself."""
        self.running_since = None
        """As in `SpanFeed`: no cell runs of which this shows anything."""
        self.first = 0
        self.lost = table.lost
        self.num_patched = 0
        self.taken = 0
        """How far they were asked for, to be sent."""

    @property
    def store(self) -> KeptSpans:
        """It is its own."""
        return self

    @property
    def end(self) -> int:
        """Number of spans."""
        return len(self._table)

    def table(self, start: int = 0, stop: int | None = None) -> SpanTable:
        """The spans with numbers from `start` to `stop`, without it."""
        low = min(max(start, 0), self.end)
        high = self.end if stop is None else min(max(stop, low), self.end)
        if stop is not None:  # else it is for facts about all of them
            self.taken = max(self.taken, high)
        columns = {name: column[low:high] for name, column in self._table.columns.items()}
        return SpanTable(columns, self._table.labels, self._table.groups, low, self.lost, self._table.dropped)

    def ending_after(self, time_ns: int, start: int = 0) -> SpanTable:
        """As in `SpanStore`."""
        return self.table(start)

    def patches(self, since: int) -> tuple[list[tuple[int, int, int]], int]:
        """None: all is known of each span already."""
        return [], 0
