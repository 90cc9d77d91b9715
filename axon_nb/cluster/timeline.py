"""What ranks have done, to keep: as a trace, a page, a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from axon_nb.cluster.span_feed import span_feed
from axon_nb.cluster.span_table import SpanTable
from axon_nb.errors import UsageError
from axon_nb.records.chrome import write_chrome_trace

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["cell_window", "recorded", "save_trace"]


def recorded(state: ClusterState) -> SpanTable:
    """The spans that ranks have recorded so far, as far as they are kept.

    While nobody looks these are cells, communication and pipelines; forwards, backwards and optimizer steps are
    recorded from the moment that a timeline is open.
    """
    feed = span_feed(state)
    feed.collect()
    return feed.store.table()


def cell_window(table: SpanTable, cell: int) -> tuple[int, int]:
    """Start and end of a notebook cell's last run, in nanoseconds.

    Raises:
        UsageError: there is no such cell among the spans.
    """
    found: tuple[int, int] | None = None
    names = set()
    for span in table.pick(table.of_kind("cell")).spans():
        names.add(span.name)
        if span.name == f"In [{cell}]":
            again = found is None or span.start_ns > found[1]
            found = (
                (span.start_ns, span.end_ns)
                if again or found is None
                else (
                    min(found[0], span.start_ns),
                    max(found[1], span.end_ns),
                )
            )
    if found is None:
        known = ", ".join(sorted(names, key=lambda name: (len(name), name))[-8:]) or "none"
        raise UsageError(f"cell {cell}: ranks have no spans of In [{cell}]; the last cells that they ran: {known}.")
    return found


def save_trace(table: SpanTable, path: Path | str) -> None:
    """Write spans as a trace that Perfetto and chrome://tracing open, from 0 on."""
    origin = int(table.columns["start"].min()) if len(table) else 0
    spans = (span._replace(start_ns=span.start_ns - origin, end_ns=span.end_ns - origin) for span in table.spans())
    write_chrome_trace(spans, path)
