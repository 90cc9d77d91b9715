"""The timeline of a planned program: the view of `%timeline`, with the spans of ranks that do not exist."""

from __future__ import annotations

from collections.abc import Sequence

import traitlets

from axon_nb.cluster.inspection.span_store import SpanStore
from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.spans import Span
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.timeline.record import Timeline, page_traits
from axon_nb.widgets.view import View

_MAX_SPANS = 30_000
"""What Jupyter's server lets through at once."""


class FinishedTimelineView(View):
    """A timeline that gets no more spans.

    Args:
        table: The spans; of many, the first are shown.
        ranks: Rows, from the top.
        title: What is shown.
    """

    _esm = script("timeline")
    _css = style("timeline")

    tools = traitlets.Unicode(script("timeline/tools/tools")).tag(sync=True)
    """The script of features that a page loads only when they are used."""
    config = traitlets.Dict().tag(sync=True)
    snapshot = traitlets.Bytes(b"").tag(sync=True)

    def __init__(self, table: SpanTable, ranks: Sequence[int], *, title: str) -> None:
        config, snapshot = page_traits(table.head(_MAX_SPANS), ranks, title=title)
        super().__init__(config=config, snapshot=snapshot)


class PlannedTimeline(Timeline):
    """The spans of a planned program, to save or to show.

    Args:
        spans: The spans of one rank of each kind.
        title: What is shown.
    """

    def __init__(self, spans: Sequence[Span], title: str) -> None:
        store = SpanStore()
        store.add(sorted(spans, key=lambda span: span.end_ns))
        self._table = store.table()
        self._ranks = sorted({span.rank for span in spans})
        self._title = title

    @property
    def title(self) -> str:
        """What was planned."""
        return self._title

    def table(self) -> SpanTable:
        """Return the spans."""
        return self._table

    def view(self) -> FinishedTimelineView:
        """Return the view for a notebook."""
        return FinishedTimelineView(self._table, self._ranks, title=self._title)

    def bundle(self) -> dict[str, str]:
        """Return the spans as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        return timeline_bundle(self._table, self._ranks, title=self._title)
