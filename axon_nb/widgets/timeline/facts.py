"""What spans say of each rank: time by kind, how much communication was hidden behind computing, who was waited for.

The last step of each pipeline, out of a table of very many spans.
"""

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
_MOVING = ("collective", "p2p")
_WORTH = 0.02
"""Waiting for late ranks is told of from this share of all ranks' time on."""
_LEAST_COLLECTIVES = 5
_MOST = 0.5
"""A rank is a straggler when this share of all that waiting was for it, and no less than twice an even share."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank; times in seconds."""

    rank: int
    forward: float
    backward: float
    optimizer: float
    communicating: float
    """While at least one collective, send or recv was under way."""
    hidden: float
    """The part of `communicating` in which the rank computed besides."""
    waiting: float
    """While the rank's own code was held up by communication."""
    waited_for: float
    """What other ranks waited, all together, because this one began a collective last."""
    last_to: int
    """How many collectives it began last."""
    bytes: int
    """What its collectives, sends and recvs carried on this rank."""


@dataclass(frozen=True, slots=True)
class TimelineFacts:
    """All ranks; times in seconds."""

    ranks: tuple[RankFacts, ...]
    seconds: float
    """From the first start to the last end."""
    num_spans: int
    num_collectives: int
    """Whose calls are known on all ranks."""
    straggler: str
    """A sentence on the rank that others waited for most; empty when there is none."""

    @property
    def overlap(self) -> float | None:
        """Share of communication that was hidden behind computing, 0 to 1, over all ranks; None: there was none."""
        moving = sum(rank.communicating for rank in self.ranks)
        return sum(rank.hidden for rank in self.ranks) / moving if moving else None


def timeline_facts(table: SpanTable) -> TimelineFacts:
    """What the spans say.

    A rank counts as computing in a forward, backward or step while it is not held up by communication. From the moment
    a backward's last collective has begun nothing is left to compute in it, so the rest of it counts as held up, too:
    DDP waits there in C++, where no span is recorded.
    """
    columns = table.columns
    kinds = {kind: table.of_kind(kind) for kind in (*_COMPUTING, *_MOVING, "wait")}
    known = kinds["collective"] & (columns["by"] >= 0)
    ranks = tuple(_rank_facts(table, int(rank), kinds, known) for rank in np.unique(columns["rank"]))
    seconds = (int(columns["end"].max()) - int(columns["start"].min())) / 1e9 if len(table) else 0.0
    own_last = known & (columns["by"] == columns["rank"])
    count = int(own_last.sum())
    return TimelineFacts(ranks, seconds, len(table), count, _straggler(ranks, seconds, count))


def _rank_facts(
    table: SpanTable, rank: int, kinds: dict[str, npt.NDArray[np.bool_]], known: npt.NDArray[np.bool_]
) -> RankFacts:
    columns = table.columns
    own = columns["rank"] == rank

    def times(*names: str) -> tuple[_Times, _Times]:
        which = own & np.logical_or.reduce([kinds[name] for name in names])
        return columns["start"][which], columns["end"][which]

    def seconds(name: str) -> float:
        starts, ends = times(name)
        return float((ends - starts).sum()) / 1e9

    moving, waiting = times(*_MOVING), times("wait")
    held_up = tuple(np.concatenate(pair) for pair in zip(waiting, _tails(times("backward"), moving), strict=True))
    covered, lengths = _coverage(moving, times(*_COMPUTING), (held_up[0], held_up[1]), waiting)
    in_moving, in_computing, in_held_up, in_waiting = covered
    because = known & (columns["by"] == rank) & ~own
    return RankFacts(
        rank=rank,
        forward=seconds("forward"),
        backward=seconds("backward"),
        optimizer=seconds("optimizer"),
        communicating=float(lengths[in_moving].sum()) / 1e9,
        hidden=float(lengths[in_moving & in_computing & ~in_held_up].sum()) / 1e9,
        waiting=float(lengths[in_waiting].sum()) / 1e9,
        waited_for=float(columns["late"][because].sum()) / 1e9,
        last_to=int((known & (columns["by"] == rank) & own).sum()),
        bytes=int(columns["bytes"][own & (kinds["collective"] | kinds["p2p"])].sum()),
    )


def _tails(backwards: tuple[_Times, _Times], moving: tuple[_Times, _Times]) -> tuple[_Times, _Times]:
    """Of each backward, the rest from where the last communication in it begins to where that, or it, ends."""
    order = np.argsort(moving[0], kind="stable")
    starts, ends = moving[0][order], moving[1][order]
    if not len(starts):
        return starts, ends
    last = np.searchsorted(starts, backwards[1]) - 1
    inside = (last >= 0) & (starts[last] >= backwards[0])
    return starts[last[inside]], np.minimum(ends[last[inside]], backwards[1][inside])


def _coverage(*sets: tuple[_Times, _Times]) -> tuple[list[npt.NDArray[np.bool_]], _Times]:
    """The stretches between all starts and ends: whether each set covers them, and their lengths."""
    points = np.concatenate([times for pair in sets for times in pair])
    order = np.argsort(points, kind="stable")
    covered = []
    place = 0
    for starts, ends in sets:
        steps = np.zeros(len(points), dtype=np.int64)
        steps[place : place + len(starts)] = 1
        steps[place + len(starts) : place + len(starts) + len(ends)] = -1
        place += len(starts) + len(ends)
        covered.append(np.cumsum(steps[order])[:-1] > 0)
    return covered, np.diff(points[order])


def _straggler(ranks: tuple[RankFacts, ...], seconds: float, count: int) -> str:
    total = sum(rank.waited_for for rank in ranks)
    if len(ranks) < 2 or count < _LEAST_COLLECTIVES or total < _WORTH * seconds * len(ranks):
        return ""
    worst = max(ranks, key=lambda rank: rank.waited_for)
    share = worst.waited_for / total
    if share < max(_MOST, min(2 / len(ranks), 0.75)):
        return ""
    return (
        f"Straggler: rank {worst.rank} came last to {worst.last_to} of {count} collectives; other ranks waited "
        f"{format_seconds(worst.waited_for)} for it, {share:.0%} of all waiting for late ranks."
    )


_LIMITS = (512, 8192)
"""Spans of each rank in each pipeline that are looked at: few at first, more where they hold no whole step."""


def pipeline_steps(table: SpanTable) -> list[PipelineStep]:
    """The newest pipeline first; those of which no step is over on all ranks are left out."""
    names = sorted({group for _, _, group in table.labels})
    number = {name: index for index, name in enumerate(names)}
    group_of = np.array([number[group] for _, _, group in table.labels], dtype=np.int64)
    rows = np.flatnonzero(table.of_kind("forward", "backward") & (table.columns["stage"] >= 0))
    found: dict[str, PipelineStep] = {}
    for limit in _LIMITS:
        groups = group_of[table.columns["label"][rows]] if len(rows) else rows
        chosen = rows[_last_of_each(groups * (1 << 32) + table.columns["rank"][rows], limit)]
        which = np.zeros(len(table), dtype=bool)
        which[chosen] = True
        for step in last_steps(table.pick(which).spans(), members=table.groups):
            found[step.group] = step
        # Those that are known need no second look, nor do those that have been looked at as a whole.
        rest = np.isin(groups, [number[name] for name in names if name not in found])
        if len(chosen) == len(rows) or not rest.any():
            break
        rows = rows[rest]
    return sorted(found.values(), key=lambda step: max(span.end_ns for span in step.measured), reverse=True)


def _last_of_each(keys: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.bool_]:
    """Which places are among the last `limit` with their key."""
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    ends = np.append(edges, len(keys))
    sizes = np.diff(np.concatenate(([0], ends)))
    after = np.repeat(ends, sizes) - 1 - np.arange(len(keys))
    chosen = np.zeros(len(keys), dtype=bool)
    chosen[order] = after < limit
    return chosen
