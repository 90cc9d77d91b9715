"""An immutable table of spans from many ranks, stored as columns: compact and fast to filter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from axon_nb.records.spans import GPU, LAUNCH, Span

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "start": np.int64,
    "end": np.int64,
    "bytes": np.int64,
    "sequence": np.int64,
    "late": np.int64,
    "label": np.int32,
    "rank": np.int32,
    "stage": np.int32,
    "microbatch": np.int32,
    "by": np.int32,
    "line": np.int32,
    "clock": np.int8,
}
"""Name and type of each column.

Times are in nanoseconds of the notebook's monotonic clock. `late` is how long the call waited for the last rank to
start it, `by` that rank (-1: unknown), `label` an index into `labels`, `line` the
line of the cell that called it (0: unknown), `clock` an index into `CLOCKS`.
"""
CLOCKS = ("", GPU, LAUNCH)
"""Whose times spans have, as `Span.clock`."""

Label = tuple[str, str, str]
"""Kind, name, group."""


def grouped(
    values: npt.NDArray[np.int64], which: npt.NDArray[np.bool_] | None = None
) -> list[tuple[int, npt.NDArray[np.intp]]]:
    """Return each distinct value, sorted, with the places where it is; sorts once, however many there are.

    Args:
        values: A column, such as ranks.
        which: A mask of the places to look at; None: all.
    """
    places = np.arange(len(values)) if which is None else np.flatnonzero(which)
    if not len(places):
        return []
    order = places[np.argsort(values[places], kind="stable")]
    distinct, begins = np.unique(values[order], return_index=True)
    return list(zip(distinct.tolist(), np.split(order, begins[1:]), strict=True))


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Spans in the order in which they arrived; all columns have the same length."""

    columns: dict[str, npt.NDArray[np.int64]]
    """The columns, by the names in `COLUMNS`."""
    labels: tuple[Label, ...]
    """The labels that the column `label` refers to."""
    groups: dict[str, tuple[int, ...]]
    """The ranks of process groups, by name."""
    first: int = 0
    """Number of the first span; older ones were dropped."""
    lost: int = 0
    """Number of spans that ranks discarded because they were recorded faster than they were fetched."""
    dropped: int = 0
    """Number of requested spans that the store had already dropped."""
    clock_error_ns: int = 0
    """By how much times of ranks on different hosts may differ, in nanoseconds; 0: all ranks are on one host."""

    def __len__(self) -> int:
        return len(self.columns["start"])

    def of_kind(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Return a mask of the spans of these kinds."""
        wanted = np.array([label[0] in kinds for label in self.labels], dtype=bool)
        labels = self.columns["label"]
        return wanted[labels] if len(self.labels) else np.zeros(len(labels), dtype=bool)

    def pick(self, which: npt.NDArray[np.bool_]) -> SpanTable:
        """Return the spans selected by a mask, numbered from 0."""
        columns = {name: column[which] for name, column in self.columns.items()}
        return dataclasses.replace(self, columns=columns, first=0)

    def head(self, count: int) -> SpanTable:
        """Return the first `count` spans."""
        columns = {name: column[:count] for name, column in self.columns.items()}
        return dataclasses.replace(self, columns=columns)

    def between(self, start_ns: int, end_ns: int | None = None) -> SpanTable:
        """Return the spans that end after `start_ns` and, if `end_ns` is given, start before it."""
        which = self.columns["end"] > start_ns
        return self.pick(which if end_ns is None else which & (self.columns["start"] < end_ns))

    def spans(self) -> Iterator[Span]:
        """Yield each span as a record."""
        names = ("rank", "label", "start", "end", "bytes", "stage", "microbatch", "sequence", "line", "clock")
        for rank, label, start, end, size, stage, microbatch, sequence, line, clock in zip(
            *(self.columns[name].tolist() for name in names), strict=True
        ):
            kind, name, group = self.labels[label]
            yield Span(rank, kind, name, start, end, group, size, stage, microbatch, sequence, line, CLOCKS[clock])

    def to_frame(self) -> pd.DataFrame:
        """Return one row per span, ordered by start.

        `start` is in seconds from the first span. `waited_s` is how long a collective waited for the last rank to start
        it, and `waited_for` that rank; `line` is the line of the cell that called it. All are missing if unknown.
        `clock` says whose times these are: ``host``, ``gpu``, or ``launch``: when the host launched work of a GPU.
        """
        import pandas as pd

        columns, origin = self.columns, int(self.columns["start"].min()) if len(self) else 0
        known = columns["by"] >= 0
        labels = [self.labels[label] for label in columns["label"].tolist()]
        frame = pd.DataFrame(
            {
                "rank": columns["rank"],
                "kind": [label[0] for label in labels],
                "name": [label[1] for label in labels],
                "group": [label[2] for label in labels],
                "start": (columns["start"] - origin) / 1e9,
                "seconds": (columns["end"] - columns["start"]) / 1e9,
                "bytes": columns["bytes"],
                "stage": pd.array(columns["stage"], dtype="Int64"),
                "microbatch": pd.array(columns["microbatch"], dtype="Int64"),
                "waited_s": np.where(known, columns["late"] / 1e9, np.nan),
                "waited_for": pd.array(columns["by"], dtype="Int64"),
                "line": pd.array(columns["line"], dtype="Int64"),
                "clock": [CLOCKS[clock] or "host" for clock in columns["clock"].tolist()],
            }
        )
        for name in ("stage", "microbatch", "waited_for"):
            frame[name] = frame[name].mask(frame[name] < 0)
        frame["line"] = frame["line"].mask(frame["line"] == 0)
        return frame.sort_values("start", kind="stable", ignore_index=True)
