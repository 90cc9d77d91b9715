"""Statistics of spans per rank (time by kind, overlap, waiting for late ranks), and the last step of each pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.training.pipeline import PipelineStep
from axon_nb.records.training.pipeline_steps import last_steps
from axon_nb.records.units import format_seconds

__all__ = ["RankFacts", "TimelineFacts", "pipeline_steps", "timeline_facts"]

_Times = npt.NDArray[np.int64]

_COMPUTING = ("forward", "backward", "optimizer")
_COMMUNICATING = ("collective", "p2p")
_MIN_WAITING = 0.02
"""Share of all ranks' time from which on waiting for late ranks is reported."""
_MIN_COLLECTIVES = 5
_STRAGGLER_SHARE = 0.5
"""A rank is a straggler if this share of that waiting was for it, and at least twice an even share."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank; times in seconds."""

    rank: int
    forward: float
    backward: float
    optimizer: float
    communicating: float
    """While at least one collective, send or recv was in progress."""
    hidden: float
    """The part of `communicating` during which the rank also computed."""
    waiting: float
    """While communication blocked the rank's own code."""
    waited_for: float
    """Time that the other ranks waited in total because this one started a collective last."""
    times_last: int
    """Number of collectives that it started last."""
    bytes: int
    """Carried by the rank's collectives, sends and recvs."""


@dataclass(frozen=True, slots=True)
class TimelineFacts:
    """All ranks; times in seconds."""

    ranks: tuple[RankFacts, ...]
    seconds: float
    """From the first start to the last end."""
    num_spans: int
    num_collectives: int
    """Collectives whose calls are known on all ranks."""
    straggler: str
    """A sentence on the rank that others waited for most; empty if there is none."""

    @property
    def overlap(self) -> float | None:
        """Share of communication hidden behind computation, 0 to 1, over all ranks; None: no communication."""
        communicating = sum(rank.communicating for rank in self.ranks)
        return sum(rank.hidden for rank in self.ranks) / communicating if communicating else None


def timeline_facts(table: SpanTable) -> TimelineFacts:
    """Compute the statistics of all spans.

    A rank computes during a forward, backward or step unless communication blocks it. After a backward's last
    collective has started, nothing is left to compute in it, so the rest of it counts as blocked, too: DDP waits there
    in C++, where no span is recorded.
    """
    columns = table.columns
    kinds = {kind: table.of_kind(kind) for kind in (*_COMPUTING, *_COMMUNICATING, "wait")}
    known = kinds["collective"] & (columns["by"] >= 0)
    ranks = tuple(_rank_facts(table, int(rank), kinds, known) for rank in np.unique(columns["rank"]))
    seconds = (int(columns["end"].max()) - int(columns["start"].min())) / 1e9 if len(table) else 0.0
    num_collectives = int((known & (columns["by"] == columns["rank"])).sum())
    return TimelineFacts(ranks, seconds, len(table), num_collectives, _straggler(ranks, seconds, num_collectives))


def _rank_facts(
    table: SpanTable, rank: int, kinds: dict[str, npt.NDArray[np.bool_]], known: npt.NDArray[np.bool_]
) -> RankFacts:
    columns = table.columns
    is_own = columns["rank"] == rank

    def times(*names: str) -> tuple[_Times, _Times]:
        selected = is_own & np.logical_or.reduce([kinds[name] for name in names])
        return columns["start"][selected], columns["end"][selected]

    def seconds(name: str) -> float:
        starts, ends = times(name)
        return float((ends - starts).sum()) / 1e9

    communicating, waiting = times(*_COMMUNICATING), times("wait")
    tails = _tails(times("backward"), communicating)
    blocked = (np.concatenate((waiting[0], tails[0])), np.concatenate((waiting[1], tails[1])))
    covered, lengths = _coverage(communicating, times(*_COMPUTING), blocked, waiting)
    is_communicating, is_computing, is_blocked, is_waiting = covered
    waited_for_it = known & (columns["by"] == rank) & ~is_own
    return RankFacts(
        rank=rank,
        forward=seconds("forward"),
        backward=seconds("backward"),
        optimizer=seconds("optimizer"),
        communicating=float(lengths[is_communicating].sum()) / 1e9,
        hidden=float(lengths[is_communicating & is_computing & ~is_blocked].sum()) / 1e9,
        waiting=float(lengths[is_waiting].sum()) / 1e9,
        waited_for=float(columns["late"][waited_for_it].sum()) / 1e9,
        times_last=int((known & (columns["by"] == rank) & is_own).sum()),
        bytes=int(columns["bytes"][is_own & (kinds["collective"] | kinds["p2p"])].sum()),
    )


def _tails(backwards: tuple[_Times, _Times], communication: tuple[_Times, _Times]) -> tuple[_Times, _Times]:
    """Return the time of each backward from the start of its last communication to the end of either."""
    order = np.argsort(communication[0], kind="stable")
    starts, ends = communication[0][order], communication[1][order]
    if not len(starts):
        return starts, ends
    last = np.searchsorted(starts, backwards[1]) - 1
    inside = (last >= 0) & (starts[last] >= backwards[0])
    return starts[last[inside]], np.minimum(ends[last[inside]], backwards[1][inside])


def _coverage(*sets: tuple[_Times, _Times]) -> tuple[list[npt.NDArray[np.bool_]], _Times]:
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


def _straggler(ranks: tuple[RankFacts, ...], seconds: float, num_collectives: int) -> str:
    total = sum(rank.waited_for for rank in ranks)
    if len(ranks) < 2 or num_collectives < _MIN_COLLECTIVES or total < _MIN_WAITING * seconds * len(ranks):
        return ""
    worst = max(ranks, key=lambda rank: rank.waited_for)
    share = worst.waited_for / total
    if share < max(_STRAGGLER_SHARE, min(2 / len(ranks), 0.75)):
        return ""
    return (
        f"Straggler: rank {worst.rank} came last to {worst.times_last} of {num_collectives} collectives; other ranks "
        f"waited {format_seconds(worst.waited_for)} for it, {share:.0%} of all waiting for late ranks."
    )


_LIMITS = (512, 8192)
"""Number of last spans per rank and pipeline that are read: few at first, more if they hold no complete step."""


def pipeline_steps(table: SpanTable) -> list[PipelineStep]:
    """Return the last step of each pipeline, the newest first; omit pipelines without a step finished on all ranks."""
    names = sorted({group for _, _, group in table.labels})
    index = {name: number for number, name in enumerate(names)}
    group_of = np.array([index[group] for _, _, group in table.labels], dtype=np.int64)
    rows = np.flatnonzero(table.of_kind("forward", "backward") & (table.columns["stage"] >= 0))
    found: dict[str, PipelineStep] = {}
    for limit in _LIMITS:
        groups = group_of[table.columns["label"][rows]] if len(rows) else rows
        chosen = rows[_last_of_each(groups * (1 << 32) + table.columns["rank"][rows], limit)]
        selected = np.zeros(len(table), dtype=bool)
        selected[chosen] = True
        for step in last_steps(table.pick(selected).spans(), members=table.groups):
            found[step.group] = step
        # Read more only of pipelines whose step was not found among the first spans.
        rest = np.isin(groups, [index[name] for name in names if name not in found])
        if len(chosen) == len(rows) or not rest.any():
            break
        rows = rows[rest]
    return sorted(found.values(), key=lambda step: max(span.end_ns for span in step.measured), reverse=True)


def _last_of_each(keys: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.bool_]:
    """Return which positions are among the last `limit` with their key."""
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    ends = np.append(edges, len(keys))
    sizes = np.diff(np.concatenate(([0], ends)))
    after = np.repeat(ends, sizes) - 1 - np.arange(len(keys))
    chosen = np.zeros(len(keys), dtype=bool)
    chosen[order] = after < limit
    return chosen
