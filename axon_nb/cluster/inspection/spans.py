"""The ranks' spans: an immutable table, stored as columns, and a bounded store that drops the oldest.

The store matches the calls of a collective on all ranks, to know which rank was last and how long the others waited.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

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
_MAX_OPEN = 8192
"""Maximum number of incomplete collectives; beyond it the oldest is dropped."""
LIMIT = 100_000
"""Minimum number of stored spans; up to a fifth more are stored before the oldest are dropped."""
_MAX_LABELS = 60_000
_MAX_PATCHES = 50_000
_OTHER: Label = ("other", "other", "")


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


class SpanTable(Struct, frozen=True):
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
        return msgspec.structs.replace(self, columns=columns, first=0)

    def head(self, count: int) -> SpanTable:
        """Return the first `count` spans."""
        columns = {name: column[:count] for name, column in self.columns.items()}
        return msgspec.structs.replace(self, columns=columns)

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


class CollectiveWait(Struct, frozen=True):
    """How long one rank's call of a collective waited; known once all ranks' calls are."""

    number: int
    """The call's number, as given to `add`."""
    waited_ns: int
    """Nanoseconds that the rank was in the call before the last rank started it."""
    last_rank: int
    """The rank that started it last."""


class _OpenCollective(Struct):
    name: str
    clock: str
    calls: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By rank: number, start and end in nanoseconds."""


class CollectiveMatcher:
    """Matches calls by group and sequence number in the group.

    Spans of ranks on several hosts must be on a common clock. Calls that a GPU timed are compared by their lengths:
    they end together, and their starts are estimates.
    """

    def __init__(self) -> None:
        self._members: dict[str, frozenset[int]] = {}
        self._open: dict[tuple[str, int], _OpenCollective] = {}

    def set_members(self, group: str, ranks: tuple[int, ...]) -> None:
        """Set the ranks of a group; calls in unknown groups are ignored."""
        self._members[group] = frozenset(ranks)

    def add(self, number: int, span: Span) -> list[CollectiveWait]:
        """Add a finished call; if it completes the collective, return the waits of all its calls."""
        members = self._members.get(span.group)
        if members is None or span.rank not in members or len(members) < 2 or not span.sequence:
            return []
        key = (span.group, span.sequence)
        collective = self._open.get(key)
        # Sequence numbers restart when a group is rebuilt: incomplete calls from before do not belong to it.
        if (
            collective is None
            or (collective.name, collective.clock) != (span.name, span.clock)
            or span.rank in collective.calls
        ):
            self._open.pop(key, None)
            collective = self._open[key] = _OpenCollective(span.name, span.clock)
            if len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
        start, end = (span.start_ns - span.end_ns, 0) if span.clock == GPU else (span.start_ns, span.end_ns)
        collective.calls[span.rank] = (number, start, end)
        if len(collective.calls) < len(members):
            return []
        del self._open[key]
        last = max(collective.calls, key=lambda rank: collective.calls[rank][1])
        latest = collective.calls[last][1]
        # The source of a broadcast may return before the others arrive: its wait ends with its call.
        return [
            CollectiveWait(index, max(0, min(latest, end) - start), last)
            for index, start, end in collective.calls.values()
        ]


class SpanStore:
    """Stores spans, numbered from 0 in the order in which they arrive; thread-safe."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._batch = max(1, limit // 10)
        self._columns = {name: np.zeros(limit + limit // 5, dtype) for name, dtype in COLUMNS.items()}
        self._count = 0
        self._lock = threading.RLock()
        self._labels: list[Label] = []
        self._number_of: dict[Label, int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._matcher = CollectiveMatcher()
        self._patched: deque[int] = deque(maxlen=_MAX_PATCHES)
        self.first = 0
        """Number of the oldest stored span, which is also the number of dropped ones."""
        self.lost = 0
        """Number of spans that ranks discarded because they were recorded faster than they were fetched."""
        self.clock_error_ns = 0
        """By how much times of ranks on different hosts may differ, in nanoseconds; 0: all ranks are on one host."""
        self.num_patched = 0
        """Number of updates to spans that were already stored."""
        self.last_cell: tuple[str, int, int] | None = None
        """Name, start and end in nanoseconds of the last finished cell."""

    @property
    def end(self) -> int:
        """The number of the next span."""
        return self.first + self._count

    def set_groups(self, groups: Mapping[str, Sequence[int]]) -> None:
        """Set the ranks of process groups, by name."""
        with self._lock:
            for name, ranks in groups.items():
                self._groups[name] = tuple(ranks)
                self._matcher.set_members(name, tuple(ranks))

    def add(self, spans: Iterable[Span], *, offset_ns: int = 0, lost: int = 0) -> None:
        """Add spans.

        Args:
            spans: Spans of one rank, ordered by end.
            offset_ns: What to add to their times, in nanoseconds: each host has its own clock.
            lost: Number of spans that the rank discarded.
        """
        with self._lock:
            self.lost += lost
            added = [_pipeline_message_as_wait(span) for span in spans]
            if offset_ns:
                added = [s._replace(start_ns=s.start_ns + offset_ns, end_ns=s.end_ns + offset_ns) for s in added]
            for start in range(0, len(added), self._batch):
                self._extend(added[start : start + self._batch])

    def _extend(self, spans: Sequence[Span]) -> None:
        if self._count + len(spans) > len(self._columns["start"]):
            self._drop()
        columns, place, number = self._columns, slice(self._count, self._count + len(spans)), self.end
        columns["start"][place] = [span.start_ns for span in spans]
        columns["end"][place] = [max(span.start_ns, span.end_ns) for span in spans]
        for name in ("bytes", "rank", "stage", "microbatch", "sequence", "line"):
            columns[name][place] = list(map(operator.attrgetter(name), spans))
        columns["clock"][place] = [CLOCKS.index(span.clock) for span in spans]
        columns["label"][place] = [self._label((span.kind, span.name, span.group)) for span in spans]
        columns["late"][place], columns["by"][place] = 0, -1
        self._count += len(spans)
        for index, span in enumerate(spans, start=number):
            if span.kind == "collective":
                self._match_collective(index, span)
            elif span.kind == "cell":
                self._update_last_cell(span)

    def _match_collective(self, number: int, span: Span) -> None:
        for wait in self._matcher.add(number, span):
            row = wait.number - self.first
            if row >= 0:
                self._columns["late"][row], self._columns["by"][row] = wait.waited_ns, wait.last_rank
                self._patched.append(wait.number)
                self.num_patched += 1

    def _update_last_cell(self, span: Span) -> None:
        name, start, end = self.last_cell or ("", 0, 0)
        # A cell has one span per rank; the spans of one run overlap.
        if name == span.name and span.start_ns < end and span.end_ns > start:
            self.last_cell = (name, min(start, span.start_ns), max(end, span.end_ns))
        elif span.end_ns > end:
            self.last_cell = (span.name, span.start_ns, span.end_ns)

    def _label(self, label: Label) -> int:
        if label not in self._number_of and len(self._labels) >= _MAX_LABELS:
            label = _OTHER
        number = self._number_of.setdefault(label, len(self._labels))
        if number == len(self._labels):
            self._labels.append(label)
        return number

    def _drop(self) -> None:
        dropped = self._count - self._limit
        for column in self._columns.values():
            column[: self._limit] = column[dropped : self._count].copy()
        self._count = self._limit
        self.first += dropped

    def table(self, start: int = 0, stop: int | None = None) -> SpanTable:
        """Return a copy of the spans numbered from `start` up to but excluding `stop`, as far as they are stored."""
        with self._lock:
            low = min(max(start - self.first, 0), self._count)
            high = self._count if stop is None else min(max(stop - self.first, low), self._count)
            columns = {name: column[low:high].astype(np.int64) for name, column in self._columns.items()}
            dropped = max(0, self.first - start)
            labels, groups, error_ns = tuple(self._labels), dict(self._groups), self.clock_error_ns
            return SpanTable(columns, labels, groups, self.first + low, self.lost, dropped, error_ns)

    def ending_after(self, time_ns: int, start: int = 0) -> SpanTable:
        """Return a copy of the spans from number `start` on, from the first one that ends after `time_ns`.

        Spans arrive roughly in the order of their ends, so only a few are returned for a cell that has just started.
        """
        with self._lock:
            low = min(max(start - self.first, 0), self._count)
            is_after = self._columns["end"][low : self._count] > time_ns
            num_skipped = int(is_after.argmax()) if is_after.any() else len(is_after)
            return self.table(self.first + low + num_skipped)

    def patches(self, since: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return the spans updated since `num_patched` was `since`, as (number, late, by), and its current value."""
        with self._lock:
            count = min(self.num_patched - since, len(self._patched))
            rows = [number - self.first for number in itertools.islice(reversed(self._patched), count)]
            late, by = self._columns["late"], self._columns["by"]
            patched = [(row + self.first, int(late[row]), int(by[row])) for row in reversed(rows) if row >= 0]
            return patched, self.num_patched


def _pipeline_message_as_wait(span: Span) -> Span:
    """Change the kind of a pipeline's message span to ``wait``: it covers the time that the pipeline waited for it.

    The span of the group covers the time that the message was in transit.
    """
    return span._replace(kind="wait") if span.kind == "p2p" and span.stage >= 0 else span
