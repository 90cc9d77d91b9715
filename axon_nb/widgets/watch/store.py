"""What is known of a running job: curves, pace, loops and states, put together from what the ranks tell.

Loops over all ranks: the same one of each rank as one bar, with the slowest and the fastest named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axon_nb.cluster.inspection.job import JobSnapshot
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.training.job import JobReport, MetricRow
from axon_nb.records.training.progress import Bar
from axon_nb.records.units import format_seconds
from axon_nb.widgets.watch.series import Series

__all__ = ["MAX_CURVES", "JobStore", "MergedBar", "RankRow", "merge_bars"]

_MAX_BARS = 12


@dataclass(frozen=True, slots=True)
class MergedBar:
    """One loop of all ranks that run it."""

    desc: str
    low: float
    """How far the slowest rank is, 0 to 1; 0 where nobody knows how much there is."""
    high: float
    """How far the fastest one is."""
    words: str
    """Such as ``30/100, rank 2 (fastest: 41/100), 12.1it/s, 5.8 s left``."""
    is_over: bool
    """Whether it has ended on all of them."""


def merge_bars(bars: Mapping[int, Sequence[Bar]]) -> list[MergedBar]:
    """Loops of the same name and depth, outer ones first; those that are over on all ranks come last.

    Args:
        bars: The loops of each rank.
    """
    found: dict[tuple[int, str], dict[int, Bar]] = {}
    for rank, own in sorted(bars.items()):
        for bar in own:
            found.setdefault((bar.depth, bar.desc), {})[rank] = bar
    merged = [_merge(found[key]) for key in sorted(found)]
    return sorted(merged, key=lambda bar: bar.is_over)[:_MAX_BARS]


def _merge(bars: Mapping[int, Bar]) -> MergedBar:
    parts = {rank: _part(bar) for rank, bar in bars.items()}
    slowest = min(bars, key=lambda rank: (parts[rank], bars[rank].done))
    fastest = max(bars, key=lambda rank: (parts[rank], bars[rank].done))
    slow, fast = bars[slowest], bars[fastest]
    is_over = all(bar.is_over for bar in bars.values())
    words = _count(slow)
    if _count(fast) != words:
        same = [rank for rank, bar in bars.items() if _count(bar) == words]
        words = f"{words} on {name_ranks(same)}, the slowest; {_count(fast)} on rank {fastest}, the fastest"
    elif len(bars) > 1:
        words = f"{words} on {name_ranks(bars)}"
    return MergedBar(slow.desc, parts[slowest], parts[fastest], f"{words}{_pace(slow, is_over=is_over)}", is_over)


def _part(bar: Bar) -> float:
    return min(1.0, bar.done / bar.total) if bar.total else 0.0


def _count(bar: Bar) -> str:
    return f"{bar.done}/{bar.total}" if bar.total else f"{bar.done} {bar.unit}"


def _pace(bar: Bar, *, is_over: bool) -> str:
    if is_over:
        stopped = bool(bar.total) and bar.done < (bar.total or 0)
        return f", {'stopped' if stopped else 'done'} after {format_seconds(bar.seconds)}"
    rate = bar.done / bar.seconds if bar.seconds > 0 else 0.0
    if not rate:
        return ""
    left = f", {format_seconds((bar.total - bar.done) / rate)} left" if bar.total and bar.total >= bar.done else ""
    return f", {rate:.3g} {bar.unit}/s{left}"


MAX_CURVES = 8
"""So many names have a curve, the first ones."""
_MAX_NAMES = 64
_MAX_TOLD = 12


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank, as the table shows it."""

    rank: int
    words: str
    """What it does."""
    step: int | None
    """Step of the last number that it has logged."""
    steps_per_s: float | None
    communication: float | None
    """Share of the last moments, 0 to 1."""
    memory: int
    """Bytes: on its accelerator if it has one, else resident."""


class JobStore:
    """Bounded, whatever comes. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.reports: dict[int, JobReport] = {}
        """The last one of each rank."""
        self.metrics: dict[str, Series] = {}
        """What was logged, over steps."""
        self.vitals = {name: Series(name) for name in ("steps/s", "communication", "memory")}
        """What is measured, over the seconds since the first report."""
        self.cell: int | None = None
        """The cell that runs; None: none does; 0: its number is not known."""
        self.lost = 0
        """Calls of `log` that nobody has read in time."""
        self._words: Mapping[int, str] = {}
        self._run: tuple[int, int] | None = None
        self._earlier = False
        self._shares: dict[int, float] = {}
        self._left_out: set[str] = set()
        self._began: float | None = None

    def take(self, answers: JobSnapshot, now: float) -> None:
        """Take in what all ranks say at `now`, in seconds of any clock."""
        self._began = now if self._began is None else self._began
        self._words = answers.descriptions
        # Ranks that are too busy to answer still run the cell of before.
        self.cell = self.cell or 0 if answers.cell == 0 else answers.cell
        begun = [row.run for report in answers.reports.values() for row in report.rows if not row.is_first]
        if begun and (self._run is None or max(begun) > self._run):
            self._begin_again(max(begun))
        for rank, report in sorted(answers.reports.items()):
            self.reports[rank] = report
            self.lost += report.lost
            for row in report.rows:
                self._take_row(rank, row)
            if report.state.cell is not None:
                self._take_vitals(rank, report, now - self._began)

    def _begin_again(self, run: tuple[int, int]) -> None:
        self._earlier = self._earlier or bool(self.metrics)
        self._run = run
        self.metrics.clear()

    def _take_row(self, rank: int, row: MetricRow) -> None:
        self._run = self._run or row.run
        if row.run < self._run:
            self._earlier = True
            return
        # A later one is of a fresh process, which does not know that steps have begun before it came.
        for name, value in row.values.items():
            if name not in self.metrics and len(self.metrics) >= _MAX_NAMES:
                self._left_out.add(name)
                continue
            self.metrics.setdefault(name, Series(name)).add(rank, row.step, value)

    def _take_vitals(self, rank: int, report: JobReport, seconds: float) -> None:
        if report.steps_per_s is not None:
            self.vitals["steps/s"].add(rank, seconds, report.steps_per_s)
        if report.communication is not None:
            self._shares[rank] = report.communication
            self.vitals["communication"].add(rank, seconds, report.communication)
        self.vitals["memory"].add(rank, seconds, memory_of(report))

    def rows(self) -> list[RankRow]:
        """One a rank."""
        return [self._row(rank, words) for rank, words in sorted(self._words.items())]

    def _row(self, rank: int, words: str) -> RankRow:
        report = self.reports.get(rank)
        steps = [series.latest[rank][0] for series in self.metrics.values() if rank in series.latest]
        return RankRow(
            rank,
            words,
            int(max(steps)) if steps else None,
            report.steps_per_s if report else None,
            self._shares.get(rank),
            memory_of(report) if report else 0,
        )

    @property
    def steps_per_s(self) -> float | None:
        """Steps a second of the slowest rank."""
        rates = [report.steps_per_s for report in self.reports.values() if report.steps_per_s is not None]
        return min(rates, default=None)

    @property
    def items_per_s(self) -> float | None:
        """Items a second of all ranks together."""
        rates = [report.items_per_s for report in self.reports.values() if report.items_per_s is not None]
        return sum(rates) if rates else None

    @property
    def communication(self) -> float | None:
        """Mean share over ranks, 0 to 1."""
        shares = list(self._shares.values())
        return sum(shares) / len(shares) if shares else None

    def bars(self) -> list[MergedBar]:
        """The loops of all ranks."""
        return merge_bars({rank: report.bars for rank, report in self.reports.items()})

    def notes(self) -> list[str]:
        """Sentences: what is missing, and what is not finite."""
        found = []
        for series in self.metrics.values():
            if series.not_finite:
                first = min(series.not_finite.values())
                found.append(f"{series.name} is not finite on {name_ranks(series.not_finite)}, since step {first:.0f}.")
        if more := list(self.metrics)[MAX_CURVES:]:
            rest = f" and {len(more) - _MAX_TOLD} more" if len(more) > _MAX_TOLD else ""
            found.append(f"Without a curve, as {MAX_CURVES} names have one: {', '.join(more[:_MAX_TOLD])}{rest}.")
        if self._earlier:
            found.append("Steps have begun again: the curves are those of the last run.")
        if self._left_out:
            found.append(f"{len(self._left_out)} more names are not kept: {_MAX_NAMES} are.")
        if self.lost:
            found.append(f"{self.lost} calls of axon_nb.log were dropped before they were read.")
        silent = [rank for rank in self._words if rank not in self.reports]
        if silent:
            found.append(f"Nothing is known of rank {format_ranks(silent)}.")
        return found


def memory_of(report: JobReport) -> int:
    """Bytes: on its accelerator if the rank has one, else resident."""
    return report.state.device_bytes or report.state.rss_bytes
