"""Statistics of spans per rank: time by kind, communication hidden behind computation, waiting for late ranks.

They rest on arithmetic on many intervals of time: unions, and what several sets cover.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from axon_nb.cluster.inspection.spans import CLOCKS, SpanTable, grouped
from axon_nb.records.ranks import name_ranks
from axon_nb.records.spans import GPU, LAUNCH

Times = npt.NDArray[np.int64]
Intervals = tuple[Times, Times]
"""Starts and ends in nanoseconds; they may overlap and need no order."""
_COMPUTING = ("forward", "backward", "optimizer")
_COMMUNICATING = ("collective", "p2p")
_MIN_STEPS = 2
_LAUNCHED = "some spans show when work was launched, as no event of the GPU was recorded."
_ESTIMATED = "the lengths of NCCL's operations are measured, their starts are estimated."


def join(*sets: Intervals) -> Intervals:
    """Return all intervals of several sets as one set."""
    return np.concatenate([starts for starts, _ in sets]), np.concatenate([ends for _, ends in sets])


def coverage(*sets: Intervals) -> tuple[list[npt.NDArray[np.bool_]], Times]:
    """Return the intervals between all starts and ends: whether each set covers them, and their lengths."""
    points = np.concatenate([times for pair in sets for times in pair])
    order = np.argsort(points, kind="stable")
    covered = []
    offset = 0
    for starts, ends in sets:
        steps = np.zeros(len(points), dtype=np.int64)
        steps[offset : offset + len(starts)] = 1
        steps[offset + len(starts) : offset + len(starts) + len(ends)] = -1
        offset += len(starts) + len(ends)
        covered.append(np.cumsum(steps[order])[:-1] > 0)
    return covered, np.diff(points[order])


def union(intervals: Intervals) -> Intervals:
    """Return the union as intervals that do not overlap, in order."""
    order = np.argsort(intervals[0], kind="stable")
    starts, ends = intervals[0][order], np.maximum.accumulate(intervals[1][order]) if len(order) else intervals[1]
    is_first = np.ones(len(starts), dtype=bool)
    is_first[1:] = starts[1:] > ends[:-1]
    is_last = np.append(is_first[1:], True) if len(starts) else is_first
    return starts[is_first], ends[is_last]


def union_ns(intervals: Intervals) -> int:
    """Return the length of the union in nanoseconds."""
    starts, ends = union(intervals)
    return int((ends - starts).sum())


def subtract(intervals: Intervals, holes: Intervals) -> Intervals:
    """Return the part of the intervals' union outside all holes, in order."""
    points = np.sort(np.concatenate((*intervals, *holes)), kind="stable")
    (is_inside, is_hole), _ = coverage(intervals, holes)
    kept = is_inside & ~is_hole & (points[:-1] < points[1:])
    return union((points[:-1][kept], points[1:][kept]))


def tails(backwards: Intervals, communication: Intervals) -> Intervals:
    """Return the time of each backward from the start of its last communication to the end of either.

    Nothing is left to compute then, so the rank waits: DDP does so in C++, where no span is recorded.
    """
    order = np.argsort(communication[0], kind="stable")
    starts, ends = communication[0][order], communication[1][order]
    if not len(starts):
        return starts, ends
    last = np.searchsorted(starts, backwards[1]) - 1
    inside = (last >= 0) & (starts[last] >= backwards[0])
    return starts[last[inside]], np.minimum(ends[last[inside]], backwards[1][inside])


class RankFacts(Struct, frozen=True):
    """One rank; times in seconds.

    `forward`, `backward`, `optimizer`, `own_code` and `waiting` exclude each other: within cells they add up to `cell`.
    """

    rank: int
    forward: float
    backward: float
    optimizer: float
    own_code: float
    """In a cell, in none of the other four."""
    waiting: float
    """While communication blocked the rank's own code."""
    cell: float
    """In cells."""
    communicating: float
    """While at least one collective, send or recv was in progress."""
    hidden: float
    """The part of `communicating` during which the rank also computed."""
    waited_for: float
    """Time that the other ranks waited in total because this one started a collective last, each moment of a waiting
    rank counted once."""
    bytes: int
    """Carried by the rank's collectives, sends and recvs."""

    @property
    def computing(self) -> float:
        """In a forward, a backward or an optimizer step that did not wait."""
        return self.forward + self.backward + self.optimizer

    @property
    def known(self) -> float:
        """How long the rank's activity is known, including waiting."""
        return self.computing + self.own_code + self.waiting


class TimelineFacts(Struct, frozen=True):
    """All ranks; times in seconds."""

    ranks: tuple[RankFacts, ...]
    seconds: float
    """From the first start to the last end."""
    num_collectives: int
    """Collectives whose calls are known on all ranks."""
    step: tuple[float, float] | None
    """Mean length of a training step, and its standard deviation; None: fewer than three optimizer steps in a row."""
    launched: tuple[int, ...] = ()
    """Ranks with work of a GPU of which only the launch is known."""
    estimated: tuple[int, ...] = ()
    """Ranks with communication whose length was measured on a GPU, but not its start."""
    clock_error_ns: int = 0
    """By how much times of ranks on different hosts may differ, in nanoseconds; 0: all ranks are on one host."""
    slowed: tuple[str, ...] = ()
    """What was slowed on purpose, such as ``slowed: rank 2 × 2``."""

    @property
    def clock_notes(self) -> list[str]:
        """Sentences on times that are not those at which the work was done, or that were slowed on purpose."""
        notes = [f"S{text[1:]}." for text in self.slowed] + [
            f"{name_ranks(ranks).capitalize()}: {text}"
            for ranks, text in ((self.launched, _LAUNCHED), (self.estimated, _ESTIMATED))
            if ranks
        ]
        error_ms = self.clock_error_ns / 1e6
        return [*notes, f"The clocks of the hosts agree to ± {error_ms:.2g} ms."] if error_ms else notes

    @property
    def overlap(self) -> float | None:
        """Share of communication hidden behind computation, 0 to 1, over all ranks; None: no communication."""
        communicating = sum(rank.communicating for rank in self.ranks)
        return sum(rank.hidden for rank in self.ranks) / communicating if communicating else None


def timeline_facts(table: SpanTable, running_since: int | None = None) -> TimelineFacts:
    """Compute the statistics of all spans.

    A rank computes during a forward, backward or step unless communication blocks it. After a backward's last
    collective has started, the rest of it counts as blocked, too (see `tails`).

    Args:
        table: The spans.
        running_since: When the running cell began, in nanoseconds; None: no cell runs.
    """
    columns = table.columns
    kinds = {kind: table.of_kind(kind) for kind in ("cell", *_COMPUTING, *_COMMUNICATING, "wait")}
    known = kinds["collective"] & (columns["by"] >= 0)
    waits = dict(grouped(columns["by"], known & (columns["by"] != columns["rank"])))
    ranks = tuple(
        replace(
            _rank_facts(table, rank, own, kinds, running_since),
            waited_for=_waited_for(table, waits[rank]) if rank in waits else 0.0,
        )
        for rank, own in grouped(columns["rank"])
    )
    seconds = (int(columns["end"].max()) - int(columns["start"].min())) / 1e9 if len(table) else 0.0
    num_collectives = int((known & (columns["by"] == columns["rank"])).sum())
    clocks, communicates = columns["clock"], kinds["collective"] | kinds["p2p"]
    return TimelineFacts(
        ranks,
        seconds,
        num_collectives,
        _step(table),
        launched=_ranks_of(table, clocks == CLOCKS.index(LAUNCH)),
        estimated=_ranks_of(table, communicates & (clocks == CLOCKS.index(GPU))),
        clock_error_ns=table.clock_error_ns,
        slowed=tuple(sorted({table.labels[label][2] for label in columns["label"][kinds["cell"]].tolist()} - {""})),
    )


def _ranks_of(table: SpanTable, which: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(np.unique(table.columns["rank"][which]).tolist())


def _rank_facts(
    table: SpanTable,
    rank: int,
    own: npt.NDArray[np.intp],
    kinds: dict[str, npt.NDArray[np.bool_]],
    running_since: int | None,
) -> RankFacts:
    """Return what a rank's own spans, at the places `own` of the table, say."""
    columns = {name: table.columns[name][own] for name in ("start", "end", "bytes")}
    is_kind = {kind: mask[own] for kind, mask in kinds.items()}

    def times(*names: str) -> Intervals:
        selected = np.logical_or.reduce([is_kind[name] for name in names])
        return columns["start"][selected], columns["end"][selected]

    communicating, backward = times(*_COMMUNICATING), times("backward")
    sets = [
        join(times("wait"), tails(backward, communicating)), times("optimizer"), backward, times("forward"),
        join(times("cell"), running_cell(columns["end"], running_since)), communicating,
    ]  # fmt: skip
    (*exclusive, is_cell, is_communicating), lengths = coverage(*sets)
    seconds, is_free = [], np.ones(len(lengths), dtype=bool)
    for is_covered in (*exclusive, is_cell):
        seconds.append(float(lengths[is_covered & is_free].sum()) / 1e9)
        is_free &= ~is_covered
    waiting, optimizer, backward_s, forward, own_code = seconds
    is_computing = np.logical_or.reduce(exclusive[1:]) & ~exclusive[0]
    return RankFacts(
        rank=rank,
        forward=forward,
        backward=backward_s,
        optimizer=optimizer,
        own_code=own_code,
        waiting=waiting,
        cell=float(lengths[is_cell].sum()) / 1e9,
        communicating=float(lengths[is_communicating].sum()) / 1e9,
        hidden=float(lengths[is_communicating & is_computing].sum()) / 1e9,
        waited_for=0.0,
        bytes=int(columns["bytes"][is_kind["collective"] | is_kind["p2p"]].sum()),
    )


def running_cell(ends: Times, since: int | None) -> Intervals:
    """Return the known part of one rank's running cell: up to the end of its last span."""
    known = [(since, int(ends.max()))] if since is not None and len(ends) and ends.max() > since else []
    return np.array([start for start, _ in known], dtype=np.int64), np.array([end for _, end in known], dtype=np.int64)


def _waited_for(table: SpanTable, waits: npt.NDArray[np.intp]) -> float:
    """Return the seconds for which others waited for a rank, in the calls at these places: several may overlap."""
    ranks, starts, late = (table.columns[name][waits] for name in ("rank", "start", "late"))
    return sum(union_ns((starts[own], starts[own] + late[own])) for _, own in grouped(ranks)) / 1e9


def _step(table: SpanTable) -> tuple[float, float] | None:
    """Return mean and standard deviation of the time from one optimizer step to the next, over all ranks."""
    lengths = [np.diff(starts) for starts in optimizer_steps(table, "start")]
    seconds = np.concatenate(lengths) / 1e9 if lengths else np.zeros(0)
    return (float(seconds.mean()), float(seconds.std())) if len(seconds) >= _MIN_STEPS else None


def optimizer_steps(table: SpanTable, edge: str) -> Iterator[Times]:
    """Yield the start or the end of the optimizer steps of each rank.

    If several optimizers step one after the other, the first one's start and the last one's end count.
    """
    columns = table.columns
    is_step, is_pass = table.of_kind("optimizer"), table.of_kind("forward", "backward")
    for _, own in grouped(columns["rank"], is_step | is_pass):
        order = own[np.argsort(columns["start"][own], kind="stable")]
        steps = is_step[order]
        chosen = steps.copy()
        if edge == "start":
            chosen[1:] &= ~steps[:-1]
        else:
            chosen[:-1] &= ~steps[1:]
        yield columns[edge][order][chosen]
