"""What `axon_nb.show.timeline` returns: what ranks have done, to keep as a table, a trace or a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.span_table import SpanTable
from axon_nb.cluster.timeline import cell_window, recorded, save_trace
from axon_nb.errors import UsageError
from axon_nb.widgets.timeline_file import timeline_file
from axon_nb.widgets.timeline_page import timeline_bundle

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Timeline"]

_ENDINGS = (".json", ".html", ".csv")


class Timeline:
    """The spans of some ranks, asked for anew each time.

    Args:
        cluster: Whose ranks.
        ranks: Which.
        cell: Number of the notebook cell that is meant; None: everything that is kept.
    """

    def __init__(self, cluster: Cluster, ranks: list[int], *, cell: int | None = None) -> None:
        self._cluster = cluster
        self._ranks = ranks
        self._cell = cell

    @property
    def title(self) -> str:
        """Such as ``In [3]``; empty for everything."""
        return "" if self._cell is None else f"In [{self._cell}]"

    def table(self) -> SpanTable:
        """The spans.

        Raises:
            UsageError: ranks have no spans of that cell.
        """
        table = recorded(self._cluster.state)
        if self._cell is not None:
            table = table.between(*cell_window(table, self._cell))
        if len(self._ranks) < self._cluster.world_size:
            table = table.pick(np.isin(table.columns["rank"], self._ranks))
        return table

    def to_dataframe(self) -> pd.DataFrame:
        """One row a span: rank, kind, name, group, start, seconds, bytes, stage, microbatch, waited_s, waited_for."""
        return self.table().to_dataframe()

    def save(self, path: Path | str) -> None:
        """Write the spans, by the name's ending: .json (a trace for Perfetto), .html (a page of its own), or .csv.

        Raises:
            UsageError: the name ends otherwise.
        """
        ending = Path(path).suffix
        if ending not in _ENDINGS:
            raise UsageError(f"{str(path)!r}: a timeline is saved as {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}.")
        table = self.table()
        if ending == ".html":
            Path(path).write_text(timeline_file(table, self._ranks, title=self.title or "Timeline"), encoding="utf-8")
        elif ending == ".csv":
            table.to_dataframe().to_csv(path, index=False)
        else:
            save_trace(table, path)

    def __repr__(self) -> str:
        return timeline_bundle(self.table(), self._ranks, title=self.title)["text/plain"]

    def _ipython_display_(self) -> None:
        """Nothing: where it was made, it was shown."""
