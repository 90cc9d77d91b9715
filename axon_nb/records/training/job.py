"""One rank's report on its running job: logged metrics, progress, state, and throughput over the most recent steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from axon_nb.records.telemetry import RankState
from axon_nb.records.training.progress import Bar

_WINDOW_NS = 10_000_000_000
_SLOW_FACTOR = 2.0
"""An unfinished step counts once it has taken this many times as long as the steps before it."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One call of `axon_nb.log`."""

    step: int
    run: tuple[int, int]
    """Training run; see `records.metrics.Logged`."""
    is_first: bool
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class JobReport:
    """Snapshot of one rank's job."""

    rank: int
    pid: int
    """Its process: a replacement has none of the earlier metrics."""
    state: RankState
    rows: tuple[MetricRow, ...]
    """Metrics logged since the last request, oldest first."""
    position: int
    """Position at which to continue reading."""
    lost: int
    """Number of calls of `log` dropped before they were read."""
    is_last: bool
    """Whether everything has been read."""
    steps: int
    """Steps so far, counted by `log` or else by optimizer steps."""
    steps_per_s: float | None
    items_per_s: float | None
    span_position: int
    """Position at which to continue reading spans."""
    communication: float | None
    """Fraction of the time since the last request with communication in progress, 0 to 1; None if unknown."""
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Steps and items per second; None if unknown."""

    steps_per_s: float | None = None
    items_per_s: float | None = None


class RateMeter:
    """Measures throughput over the last `capacity` marks; one thread marks, any thread may read."""

    def __init__(self, capacity: int = 256) -> None:
        self._marks: deque[tuple[int, int, float]] = deque(maxlen=capacity)
        self._steps = 0
        self._items = 0.0

    @property
    def steps(self) -> int:
        """Total number of steps so far."""
        return self._steps

    def mark(self, now_ns: int, *, steps: int = 1, items: float = 0.0) -> None:
        """Record that `steps` more steps with `items` items have finished."""
        self._steps += steps
        self._items += items
        self._marks.append((now_ns, self._steps, self._items))

    def rates(self, now_ns: int, *, running: bool) -> Throughput:
        """Throughput over the last ten seconds with steps, or over the last step if it took longer.

        Args:
            now_ns: Current time in nanoseconds, on the clock of the marks.
            running: Whether a cell is running; if so, a slow unfinished step counts.
        """
        marks = list(self._marks)
        if len(marks) < 2:
            return Throughput()
        last = marks[-1]
        recent = [mark for mark in marks if last[0] - mark[0] <= _WINDOW_NS]
        first = (recent if len(recent) > 1 else marks[-2:])[0]
        took, steps, items = last[0] - first[0], last[1] - first[1], last[2] - first[2]
        if running and now_ns - last[0] > _SLOW_FACTOR * took / max(1, steps):
            took = now_ns - first[0]
        if took <= 0:
            return Throughput()
        return Throughput(steps * 1e9 / took, items * 1e9 / took if items else None)
