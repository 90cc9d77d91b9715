"""What is known of a running job: curves, rates, loops and states, merged from the ranks' reports.

A curve has the lowest, mean and highest value at each step, bounded however long the job runs. Each cell is a run, with
curves of its own. The same loop on several ranks is one bar, which names the slowest and the fastest rank.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from axon_nb.cluster.inspection.status import JobSnapshot
from axon_nb.records.ranks import name_ranks
from axon_nb.records.training.job import Bar, JobReport, MetricRow
from axon_nb.records.units import format_seconds

MAX_POINTS = 160
"""Of one curve; with more, neighbouring steps are merged into one point."""
_MAX_BARS = 12
MAX_CURVES = 8
"""The first metrics have a curve each."""
MAX_OUTLINE = 40
"""Points of the curve of an earlier cell."""
MAX_RUNS = 4
"""Cells with curves: the current one, and those before it, which are drawn pale."""
VITALS = ("steps/s", "communication", "memory")
"""What is measured."""
_MAX_NAMES = 64
_MAX_LISTED = 12


class Point(NamedTuple):
    """All ranks at one step, or at several that were merged."""

    step: float
    """The first of them."""
    low: float
    mean: float
    high: float


class _Bucket(Struct):
    """What is merged into one point: all of it, and what the ranks logged at the last of its steps."""

    low: float
    total: float
    high: float
    size: int
    step: float
    last_total: float
    last_count: int

    def merge(self, new: _Bucket) -> None:
        """Add another one; called for each value, so that it compares instead of calling `min` and `max`."""
        self.low = min(self.low, new.low)
        self.high = max(self.high, new.high)
        self.total += new.total
        self.size += new.size
        if new.step > self.step:
            self.step, self.last_total, self.last_count = new.step, new.last_total, new.last_count
        elif new.step == self.step:
            self.last_total += new.last_total
            self.last_count += new.last_count


class Series:
    """The points of one name. Not thread-safe: its owner holds a lock."""

    def __init__(self, name: str, *, limit: int = MAX_POINTS) -> None:
        self.name = name
        self.stride = 1
        """Steps in one point."""
        self.latest: dict[int, tuple[float, float]] = {}
        """The last step of each rank, and its value there."""
        self.not_finite: dict[int, float] = {}
        """Ranks with a value that is not finite, and the step of the first such value."""
        self._limit = limit
        self._points: dict[int, _Bucket] = {}
        self._added = self._changed = 0

    def add(self, rank: int, step: float, value: float) -> None:
        """Add one value; one that is not finite is noted separately."""
        last, before = self.latest.get(rank, (step, value))
        if step >= last:
            self.latest[rank] = (step, value)
        if not math.isfinite(value):
            self.not_finite.setdefault(rank, step)
            return
        self._added += 1
        self._changed += value != before
        self._merge(int(step // self.stride), _Bucket(value, value, value, 1, step, value, 1))
        while len(self._points) > self._limit:
            self._double_stride()

    def _merge(self, index: int, new: _Bucket) -> None:
        old = self._points.setdefault(index, new)
        if old is not new:
            old.merge(new)

    def _double_stride(self) -> None:
        old, self._points = self._points, {}
        self.stride *= 2
        for index, bucket in old.items():
            self._merge(index // 2, bucket)

    def points(self) -> list[Point]:
        """Return the points in the order of steps; a value that holds for several steps is never between two."""
        is_stepped = 0 < self._changed <= self._added / 3
        return [
            Point(
                index * self.stride,
                bucket.low,
                bucket.last_total / bucket.last_count if is_stepped else bucket.total / bucket.size,
                bucket.high,
            )
            for index, bucket in sorted(self._points.items())
        ]

    def outline(self) -> list[Point]:
        """Return at most `MAX_OUTLINE` of the points."""
        points = self.points()
        return points[:: math.ceil(len(points) / MAX_OUTLINE) or 1]

    @property
    def now(self) -> Point | None:
        """The last value of each rank, as one point; None if there is none."""
        values = [value for _, value in self.latest.values() if math.isfinite(value)]
        if not values:
            return None
        step = max(step for step, _ in self.latest.values())
        return Point(step, min(values), sum(values) / len(values), max(values))


def pack_points(points: Sequence[Point]) -> bytes:
    """Pack as little-endian float32 all steps, then all lows, means and highs, for `static/watch/points.js`."""
    columns = zip(*points, strict=True) if points else ((), (), (), ())
    return b"".join(struct.pack(f"<{len(points)}f", *map(_clamp, column)) for column in columns)


def _clamp(value: float) -> float:
    return max(-3.4e38, min(3.4e38, value))


class MergedBar(Struct, frozen=True):
    """One loop of all ranks that run it."""

    desc: str
    low: float
    """Progress of the slowest rank, 0 to 1; 0 if the total is unknown."""
    high: float
    """Progress of the fastest rank."""
    text: str
    """Text such as ``30/100, rank 2 (fastest: 41/100), 12.1it/s, 5.8 s left``."""
    is_over: bool
    """Whether it has ended on all ranks."""
    count: str = ""
    """Of the slowest rank, such as ``30/100``."""
    rate: str = ""
    """Text such as ``12.1 it/s``; empty: unknown, or it has ended."""
    left: str = ""
    """Text such as ``5.8 s left`` or ``done after 12.0 s``."""
    behind: str = ""
    """Text such as ``rank 2 is 11 behind``; empty: all ranks are about as far."""


def merge_bars(bars: Mapping[int, Sequence[Bar]]) -> list[MergedBar]:
    """Merge loops of the same name and depth; outer ones come first, those that ended on all ranks last."""
    groups: dict[tuple[int, str], dict[int, Bar]] = {}
    for rank, rank_bars in sorted(bars.items()):
        for bar in rank_bars:
            groups.setdefault((bar.depth, bar.desc), {})[rank] = bar
    merged = [
        _merge(groups[key], {rank: _outer_loops(bars[rank], key[0]) for rank in groups[key]}) for key in sorted(groups)
    ]
    return sorted(merged, key=lambda bar: bar.is_over)[:_MAX_BARS]


def _outer_loops(bars: Sequence[Bar], depth: int) -> tuple[int, ...]:
    """Return how far the loops around a loop are, the outermost first; of several at one depth, that which runs."""
    around = sorted((bar for bar in bars if bar.depth < depth), key=lambda bar: (not bar.is_over, bar.done))
    return tuple(done for _, done in sorted({bar.depth: bar.done for bar in around}.items()))


def _merge(bars: Mapping[int, Bar], outer: Mapping[int, tuple[int, ...]]) -> MergedBar:
    shares = {rank: _share_done(bar) for rank, bar in bars.items()}
    slowest = min(bars, key=lambda rank: (outer[rank], shares[rank], bars[rank].done))
    fastest = max(bars, key=lambda rank: (outer[rank], shares[rank], bars[rank].done))
    slow, fast = bars[slowest], bars[fastest]
    is_further = outer[fastest] > outer[slowest]
    is_over = all(bar.is_over for bar in bars.values())
    text = count = _count(slow)
    if is_further:
        further = [rank for rank in bars if outer[rank] > outer[slowest]]
        rest = [rank for rank in bars if rank not in further]
        text = f"{text} on {name_ranks(rest)}; {name_ranks(further)} began the next loop"
    elif _count(fast) != text:
        same = [rank for rank, bar in bars.items() if _count(bar) == text]
        text = f"{text} on {name_ranks(same)}, the slowest; {_count(fast)} on rank {fastest}, the fastest"
    elif len(bars) > 1:
        text = f"{text} on {name_ranks(bars)}"
    rate, left = _rate(slow, is_over=is_over)
    text = ", ".join(filter(None, (text, rate, left)))
    distance = _distance(slow, fast, outer[slowest], outer[fastest])
    behind = f"rank {slowest} is {distance} behind" if distance else ""
    high = 1.0 if is_further else shares[fastest]
    return MergedBar(slow.desc, shares[slowest], high, text, is_over, count, rate, left, behind)


def _distance(slow: Bar, fast: Bar, outer_slow: tuple[int, ...], outer_fast: tuple[int, ...]) -> int:
    """Return by how many items the slowest rank is behind, if by two and by 1 % of what the fastest one has done.

    0: it is not, or a loop further outside says so.
    """
    done = fast.done
    if outer_slow != outer_fast:
        if outer_slow[:-1] != outer_fast[:-1] or not slow.total:
            return 0
        done += (outer_fast[-1] - outer_slow[-1]) * slow.total
    return done - slow.done if done - slow.done > max(1, done / 100) else 0


def _share_done(bar: Bar) -> float:
    return min(1.0, bar.done / bar.total) if bar.total else 0.0


def _count(bar: Bar) -> str:
    return f"{bar.done}/{bar.total}" if bar.total else f"{bar.done} {bar.unit}"


def _rate(bar: Bar, *, is_over: bool) -> tuple[str, str]:
    """Return the rate, and the time left or how the loop ended."""
    if is_over:
        stopped = bool(bar.total) and bar.done < (bar.total or 0)
        return "", f"{'stopped' if stopped else 'done'} after {format_seconds(bar.seconds)}"
    rate = bar.done / bar.seconds if bar.seconds > 0 else 0.0
    if not rate:
        return "", ""
    left = f"{format_seconds((bar.total - bar.done) / rate)} left" if bar.total and bar.total >= bar.done else ""
    return f"{format_rate(rate)} {bar.unit}/s" if rate >= 1 else f"{format_rate(1 / rate)} s/{bar.unit}", left


def format_rate(rate: float) -> str:
    """Format a rate with three digits, or more if it has them before the point: ``12.3``, ``1,170``."""
    return f"{rate:,.0f}" if rate >= 99.95 else f"{rate:.3g}"


class RankRow(Struct, frozen=True):
    """One rank, as the table shows it."""

    rank: int
    text: str
    """What the rank does."""
    step: int | None
    """Step of the last number that it logged."""
    steps_per_s: float | None
    communication: float | None
    """Share of the time since its last report, 0 to 1."""
    memory: int
    """Bytes: on its accelerator if it has one, else resident."""


class Run:
    """The curves of one cell."""

    def __init__(self, number: tuple[int, int], names: Sequence[str] = ()) -> None:
        self.number = number
        """The cell, 0 if it has none, and a count of runs within it; increases."""
        self.series = {name: Series(name) for name in names}
        """By name."""

    @property
    def name(self) -> str:
        """Text such as ``In [5]``."""
        cell, count = self.number
        again = f", run {count + 1}" if count else ""
        return f"In [{cell}]{again}" if cell else f"a cell{again}"


class JobStore:
    """What all ranks reported, bounded. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.reports: dict[int, JobReport] = {}
        """The last report of each rank."""
        self.logged = deque([Run((0, 0))], maxlen=MAX_RUNS)
        """Logged values, over the steps of each cell that logged any; the last is the current one."""
        self.measured = deque([Run((0, 0), VITALS)], maxlen=MAX_RUNS)
        """Measured values of the last cells, over the seconds of all cells together."""
        self.cell: int | None = None
        """The running cell; None: no cell runs; 0: its number is unknown."""
        self.last_cell = 0
        """The running cell, or the last one; 0: its number is unknown."""
        self.lost = 0
        """Calls of `log` that were dropped before they were read."""
        self.slowed = ""
        """What is slowed on purpose; empty: nothing."""
        self._states: Mapping[int, str] = {}
        self._items: dict[int, float] = {}
        self._seen: set[int] = set()
        """Ranks that reported twice in the running cell."""
        self._omitted_names: set[str] = set()
        self._past: dict[int, list[Bar]] = {}
        """Loops of each rank that had ended as the last cell began."""
        self._clock, self._updated, self._begun = 0.0, 0.0, 0.0
        """Seconds of cells so far, when that was, and how many there were as the last cell began."""

    @property
    def metrics(self) -> dict[str, Series]:
        """What the current run has logged."""
        return self.logged[-1].series

    @property
    def vitals(self) -> dict[str, Series]:
        """What was measured in the running cell, or the last one."""
        return self.measured[-1].series

    def stop(self) -> None:
        """Record that the cluster has stopped; the ranks' last states stay, in the past tense."""
        self.cell = None
        self._states = {
            rank: state if state.startswith("stopped") else f"stopped; was {state}"
            for rank, state in self._states.items()
        }

    def add(self, replies: JobSnapshot, now: float) -> None:
        """Add the reports of all ranks at `now`, in seconds of any clock."""
        before, self.slowed, self._states = self.cell, replies.slowed, replies.descriptions
        # Ranks that are too busy to reply still run the cell that they ran before.
        self.cell = self.cell or 0 if replies.cell == 0 else replies.cell
        self.last_cell = self.cell or self.last_cell
        is_another = before is None or (self.cell and before and self.cell != before)
        if self.cell is not None and is_another:
            self._begin_cell(self.cell)
        elif before is not None:
            self._clock += now - self._updated
        self._updated = now
        if self.cell and not self.measured[-1].number[0]:
            self.measured[-1].number = (self.cell, 0)
        for rank, report in sorted(replies.reports.items()):
            self.reports[rank] = report
            self.lost += report.lost
            for row in report.rows:
                self._add_row(rank, row)
            if report.state.cell is not None:
                self._add_vitals(rank, report)

    def _begin_cell(self, cell: int) -> None:
        if any(series.latest for series in self.vitals.values()):
            self.measured.append(Run((cell, 0), VITALS))
        self._items.clear()
        self._seen.clear()
        self._past = {rank: [bar for bar in report.bars if bar.is_over] for rank, report in self.reports.items()}
        self._begun = self._clock

    def _add_row(self, rank: int, row: MetricRow) -> None:
        run: Run | None = self.logged[-1]
        if run.number != row.run:
            run = next((run for run in self.logged if run.number == row.run), None)
        if run is None and not self.metrics:
            run = self.logged[-1]
            run.number = row.run
        elif run is None and row.run > self.logged[-1].number:
            run = Run(row.run)
            self.logged.append(run)
        elif run is None:
            # Cell numbers start again with the kernel: those of a replaced rank are lower than those of the others.
            if not row.is_first:
                return
            run = self.logged[-1]
        for name, value in row.values.items():
            series = run.series.get(name)
            if series is None:
                if len(run.series) >= _MAX_NAMES:
                    self._omitted_names.add(name)
                    continue
                series = run.series[name] = Series(name)
            series.add(rank, row.step, value)

    def _add_vitals(self, rank: int, report: JobReport) -> None:
        if report.steps_per_s is not None:
            self.vitals["steps/s"].add(rank, self._clock, report.steps_per_s)
        if report.items_per_s is not None:
            self._items[rank] = report.items_per_s
        # The share is that of the time since the report before, which may have been before the cell.
        if report.communication is not None and rank in self._seen:
            self.vitals["communication"].add(rank, self._clock, report.communication)
        self._seen.add(rank)
        self.vitals["memory"].add(rank, self._clock, memory_of(report))

    def mark(self, *, measured: bool) -> str:
        """Return the name of the current run if the panel's head does not say it; else an empty string."""
        runs = self.measured if measured else self.logged
        number = runs[-1].number
        return runs[-1].name if len(runs) > 1 or number[1] or number[0] not in (0, self.last_cell) else ""

    def earlier(self, name: str, *, measured: bool) -> list[Series]:
        """Return the curves of a name in earlier cells, the last one last."""
        runs = list(self.measured if measured else self.logged)[:-1]
        return [run.series[name] for run in runs if name in run.series and run.series[name].latest]

    def rows(self) -> list[RankRow]:
        """Return one row per rank."""
        return [self._row(rank, state) for rank, state in sorted(self._states.items())]

    def _row(self, rank: int, state: str) -> RankRow:
        report = self.reports.get(rank)
        steps = [series.latest[rank][0] for series in self.metrics.values() if rank in series.latest]
        rates, shares = self.vitals["steps/s"].latest, self.vitals["communication"].latest
        return RankRow(
            rank,
            state,
            int(max(steps)) if steps and self._has_logged else None,
            rates[rank][1] if rank in rates else None,
            shares[rank][1] if rank in shares else None,
            memory_of(report) if report else 0,
        )

    @property
    def cell_seconds(self) -> float:
        """Seconds for which the running cell, or the last one, was seen to run."""
        return self._clock - self._begun

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second of the slowest rank."""
        return min((rate for _, rate in self.vitals["steps/s"].latest.values()), default=None)

    @property
    def items_per_s(self) -> float | None:
        """Items per second of all ranks together."""
        return sum(self._items.values()) if self._items else None

    @property
    def communication(self) -> float | None:
        """Mean share over ranks, 0 to 1."""
        now = self.vitals["communication"].now
        return now.mean if now else None

    def bars(self) -> list[MergedBar]:
        """Return the loops of all ranks: those of the last cell that logs or has any."""
        bars = {rank: report.bars for rank, report in self.reports.items()}
        own = {rank: [bar for bar in bars[rank] if bar not in self._past.get(rank, ())] for rank in bars}
        return merge_bars(own if any(own.values()) or self._has_logged else bars)

    @property
    def _has_logged(self) -> bool:
        """Whether the current run is of the running cell, or the last one."""
        return self.logged[-1].number[0] in (0, self.last_cell)

    def notes(self) -> list[str]:
        """Return sentences about missing and non-finite values."""
        lines = []
        for series in self.metrics.values():
            if series.not_finite:
                first = min(series.not_finite.values())
                lines.append(f"{series.name} is not finite on {name_ranks(series.not_finite)}, since step {first:.0f}.")
        if more := list(self.metrics)[MAX_CURVES:]:
            rest = f" and {len(more) - _MAX_LISTED} more" if len(more) > _MAX_LISTED else ""
            lines.append(f"Only {MAX_CURVES} metrics have a curve; not shown: {', '.join(more[:_MAX_LISTED])}{rest}.")
        if any(self.earlier(name, measured=False) for name in self.metrics):
            lines.append(f"Pale curves: {', '.join(run.name for run in list(self.logged)[:-1])}.")
        if self._omitted_names:
            lines.append(f"Only {_MAX_NAMES} metrics are stored; {len(self._omitted_names)} more were dropped.")
        if self.lost:
            calls = "1 call of axon_nb.log was" if self.lost == 1 else f"{self.lost} calls of axon_nb.log were"
            lines.append(f"{calls} dropped before being read.")
        silent = [rank for rank in self._states if rank not in self.reports]
        if silent:
            lines.append(f"No report from {name_ranks(silent)} yet.")
        return lines


def memory_of(report: JobReport) -> int:
    """Return the bytes on the rank's accelerator if it has one, else those of its resident memory."""
    return report.state.device_bytes or report.state.rss_bytes
