"""A training job as one rank reports it: metrics (`axon_nb.log`), progress (`axon_nb.progress`), state and throughput.

Metrics are kept in a bounded ring. Progress is a tqdm-style line in the output, and a bar over all ranks in `%watch`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, NamedTuple, SupportsIndex, TypeVar

from msgspec import Struct

from axon_nb.errors import UsageError
from axon_nb.records.environment import RUN_ID
from axon_nb.records.telemetry import RankState, running_cell

_WINDOW_NS = 10_000_000_000
_SLOW_FACTOR = 2.0
"""An unfinished step counts once it has taken this many times as long as the steps before it."""
_CAPACITY = 8192
Item = TypeVar("Item")
_REDRAW_S = 0.1
_MAX_FINISHED = 16
_WIDTH = 10


class MetricRow(Struct, frozen=True):
    """One call of `axon_nb.log`."""

    step: int
    """As given, or counted from the start of the cell."""
    run: tuple[int, int]
    """The cell, and a count within it; see `Logged.shown_run`."""
    is_first: bool
    values: Mapping[str, float]


class JobReport(Struct, frozen=True):
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


class Throughput(Struct, frozen=True):
    """Steps and items per second; None if unknown."""

    steps_per_s: float | None = None
    items_per_s: float | None = None


class RateMeter:
    """Measures throughput over the last `capacity` marks; one thread marks, any thread may read."""

    def __init__(self, capacity: int = 256) -> None:
        self._marks: deque[tuple[int, int, float]] = deque(maxlen=capacity)
        self._steps = 0
        self._items = 0.0
        self._cell = 0

    @property
    def steps(self) -> int:
        """Total number of steps so far."""
        return self._steps

    def mark(self, now_ns: int, *, steps: int = 1, items: float = 0.0) -> None:
        """Record that `steps` more steps with `items` items have finished in the running cell."""
        if (cell := running_cell()) != self._cell:
            self._cell = cell
            self._marks.clear()
        self._steps += steps
        self._items += items
        self._marks.append((now_ns, self._steps, self._items))

    def rates(self, now_ns: int, *, cell: int | None) -> Throughput:
        """Throughput over the last ten seconds with steps, or over the last step if it took longer.

        Args:
            now_ns: Current time in nanoseconds, on the clock of the marks.
            cell: The running cell, of which a slow unfinished step counts; None: the last one with steps.
        """
        marks = list(self._marks)
        if len(marks) < 2 or cell not in (None, self._cell):
            return Throughput()
        last = marks[-1]
        recent = [mark for mark in marks if last[0] - mark[0] <= _WINDOW_NS]
        first = (recent if len(recent) > 1 else marks[-2:])[0]
        took, steps, items = last[0] - first[0], last[1] - first[1], last[2] - first[2]
        if cell is not None and now_ns - last[0] > _SLOW_FACTOR * took / max(1, steps):
            took = now_ns - first[0]
        if took <= 0:
            return Throughput()
        return Throughput(steps * 1e9 / took, items * 1e9 / took if items else None)


class Logged(NamedTuple):
    """One call of `log`."""

    step: int
    """As given, or counted per name."""
    run: tuple[int, int]
    """Training run: the cell in which it started, and a count within that cell; increases when steps restart."""
    is_first: bool
    """Whether this is the process's first run."""
    values: dict[str, Any]
    """Numbers by name; values on other devices than the CPU stay tensors until read."""
    shown_step: int
    """As given, or counted per name from the start of the cell."""
    shown_run: tuple[int, int]
    """As `run`, but each cell is one."""


class MetricRing:
    """Keeps the most recent calls of `log`; readers continue from a position and learn how many they missed."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.pace = RateMeter()
        """Throughput in steps and items per second."""
        self._records: deque[Logged] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self._next = 0
        self._last: dict[str, int] = {}
        self._ahead: dict[str, int] = {}
        self._run, self._is_first = (0, 0), True
        self._cell, self._shown_run, self._has_shown = 0, (0, 0), False
        self._begin: dict[str, int] = {}
        """The first step of each name in the running cell, if it was counted."""

    def add(self, values: dict[str, Any], *, step: int | None = None, items: float = 0.0) -> None:
        """Add the numbers of one step; takes the arguments of `log`."""
        with self._lock:
            if (cell := running_cell()) != self._cell:
                self._start_cell(cell)
            if not self._last and self._is_first:
                self._run = (cell, 0)
            if step is None:
                step = max((self._last.get(name, -1) + 1 for name in values), default=0)
                begin = max((self._begin.get(name, 0) for name in values), default=0)
            else:
                if any(step < self._last.get(name, step) for name in values):
                    self._start_run(cell)
                begin = 0
                self._begin.update(dict.fromkeys(values, 0))
            self._count(values, step, items)
            if values:
                shown = step - begin, self._shown_run
                self._has_shown = True
                self._records.append(Logged(step, self._run, self._is_first, values, *shown))
                self._next += 1

    def _start_cell(self, cell: int) -> None:
        self._cell, self._shown_run = cell, _next_run(self._shown_run, cell)
        self._begin = {name: last + 1 for name, last in self._last.items()}
        self._has_shown = False

    def _start_run(self, cell: int) -> None:
        self._run = _next_run(self._run, cell)
        if self._has_shown:
            self._shown_run = _next_run(self._shown_run, cell)
        self._is_first = False
        self._last.clear()
        self._ahead.clear()
        self._begin.clear()

    def _count(self, values: dict[str, Any], step: int, items: float) -> None:
        before = max(self._ahead.values(), default=0)
        for name in values:
            last = self._last.get(name)
            self._ahead[name] = self._ahead.get(name, 0) + (1 if last is None else step - last)
            self._last[name] = step
        more = max(self._ahead.values(), default=0) - before
        if more or items:
            self.pace.mark(time.monotonic_ns(), steps=more, items=items)

    @property
    def end(self) -> int:
        """The position after the last call."""
        return self._next

    def read(self, position: int, limit: int = 2000) -> tuple[list[Logged], int, int]:
        """Calls from `position` on, oldest first: (calls, next position, number of lost calls)."""
        with self._lock:
            first = self._next - len(self._records)
            position = position if position <= self._next else 0
            begin = max(position, first)
            records = list(itertools.islice(self._records, begin - first, begin - first + limit))
        for record in records:
            for name, value in record.values.items():
                if not isinstance(value, float):
                    record.values[name] = float(value.item())  # synchronises with the device, on the reader's thread
        return records, begin + len(records), begin - position


def _next_run(run: tuple[int, int], cell: int) -> tuple[int, int]:
    # Never decreases: cell numbers restart with the kernel while ranks keep running.
    return (cell, 0) if cell > run[0] else (run[0], run[1] + 1)


metrics = MetricRing()
"""The ring of this process."""


def log(*, step: int | None = None, items: float = 0, **values: Any) -> None:
    """Log metrics of a training step: `axon_nb.log(loss=loss, lr=0.1, items=len(batch))`.

    On ranks `%watch` plots them live; under torchrun and in plain Python they are only kept in memory. A tensor on the
    CPU is read at once. A tensor on another device is copied there and read later, so that the step does not wait for
    it.

    Args:
        step: Step number, 0 or above; None counts steps per name; `%watch` counts them from the start of the
            cell. A lower number than before starts new curves.
        items: Number of samples or tokens that this rank processed in the step, for the throughput.
        **values: Numbers or one-element tensors, by name.

    Raises:
        UsageError: a value is not a number, or `step` is not an integer >= 0.
    """
    if step is not None:
        step = _step_number(step)
    numbers = {name: _number(name, value) for name, value in values.items()}
    metrics.add(numbers, step=step, items=float(_number("items", items)))


def _step_number(step: Any) -> int:
    try:
        number = step.__index__()
    except (AttributeError, TypeError, RuntimeError):
        number = -1
    if number < 0:
        raise UsageError(f"step={step!r}: must be an integer >= 0; omit it to count steps automatically.")
    return int(number)


def _number(name: str, value: Any) -> Any:
    """A float, or a copy of a tensor on its device."""
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    kind = type(value).__name__
    refused = UsageError(f"{name} has type {kind}: `axon_nb.log` accepts numbers and one-element tensors.")
    if not hasattr(value, "item") or isinstance(value, type):
        raise refused
    placements = getattr(value, "placements", ())
    if placements:
        if not all(placement.is_replicate() for placement in placements):
            raise UsageError(f"{name} is sharded over ranks: log {name}.full_tensor().")
        value = value.to_local()
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise UsageError(f"{name} has shape {shape}: log a single number, such as {name}.mean().")
    if getattr(getattr(value, "device", None), "type", "cpu") not in ("cpu", "meta") and hasattr(value, "detach"):
        return value.detach().clone()
    try:
        return float(value.item())
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        raise refused from None


class Bar(Struct, frozen=True):
    """State of one loop on one rank."""

    desc: str
    """Its name; may be empty."""
    depth: int
    """Nesting depth within other such loops."""
    done: int
    """Number of items processed."""
    total: int | None
    """Number of items in total; None if unknown."""
    seconds: float
    """Seconds since it started."""
    is_over: bool
    """Whether it has finished, early or not."""
    unit: str = "it"
    """Name of one item."""


class Progress(Generic[Item]):
    """An iterable that counts its items as they are processed; created by `progress`."""

    def __init__(self, iterable: Iterable[Item], *, total: int | None, desc: str, unit: str) -> None:
        self._iterable = iterable
        self.total = len(iterable) if total is None and isinstance(iterable, Sized) else total
        self.desc = str(desc)
        self.unit = str(unit)
        self.done = 0
        self.depth = 0
        self.cell = 0
        self._began = time.monotonic()
        self._ended: float | None = None

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError(f"{type(self._iterable).__name__} has no length; pass it as progress(…, total=N)")
        return self.total

    def __iter__(self) -> Iterator[Item]:
        self.done, self._began, self._ended, self.cell = 0, time.monotonic(), None, running_cell()
        _loops.begin(self)
        try:
            for item in self._iterable:
                yield item
                self.done += 1
                _loops.redraw()
        except GeneratorExit:  # the loop was left; Python prints what is raised here, an interrupt, and goes on
            with contextlib.suppress(KeyboardInterrupt):
                self._end()
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self._ended = time.monotonic()
        _loops.end(self)

    def snapshot(self) -> Bar:
        """Return its current state."""
        end = time.monotonic() if self._ended is None else self._ended
        over = self._ended is not None
        return Bar(self.desc, self.depth, self.done, self.total, end - self._began, over, self.unit)


def progress(
    iterable: Iterable[Item], *, total: SupportsIndex | None = None, desc: str = "", unit: str = "it"
) -> Progress[Item]:
    """Show the progress of a loop: `for batch in axon_nb.progress(loader):`.

    In a cell each rank prints a progress line (identical ones are merged), and `%watch` draws one bar over all ranks
    that shows the slowest. Under torchrun only rank 0 prints the line.

    Args:
        iterable: What to loop over.
        total: Number of items; None for its length, if it has one.
        desc: Label of the bar.
        unit: Name of one item.

    Raises:
        UsageError: it is not iterable, or `total` is not an integer >= 0.
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise UsageError(f"progress({type(iterable).__name__}): must be iterable, as in progress(range(10)).")
    try:
        count = None if total is None else operator.index(total)
    except TypeError:
        count = -1
    if count is not None and count < 0:
        raise UsageError(f"progress(…, total={total!r}): must be an integer >= 0, or None if it is not known.")
    return Progress(iterable, total=count, desc=desc, unit=unit)


class _OpenLoops:
    """The loops of this process, nested in each other, and the last ones that have ended."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[Progress[Any]] = []
        self._ended: deque[tuple[int, Bar]] = deque(maxlen=_MAX_FINISHED)
        """Cell and final state of finished loops, without their iterables."""
        self._drawn_at = 0.0
        self._length = 0
        """Length of the line that was drawn last."""

    def begin(self, loop: Progress[Any]) -> None:
        """Add a loop that starts within the open ones."""
        with self._lock:
            loop.depth = len(self._open)
            self._open.append(loop)
        self.redraw()

    def end(self, loop: Progress[Any]) -> None:
        """Keep the final state of a loop."""
        with self._lock:
            if loop in self._open:
                self._open.remove(loop)
            self._ended.append((loop.cell, loop.snapshot()))
            if not self._open and _is_drawing():
                self._draw(_line([loop]), "\n")

    def redraw(self) -> None:
        """Draw the open loops, at most ten times per second."""
        now = time.monotonic()
        if now - self._drawn_at < _REDRAW_S:
            return
        with self._lock:
            self._drawn_at = now
            if self._open and _is_drawing():
                self._draw(_line(self._open), "")

    def _draw(self, line: str, end: str) -> None:
        # Blank out the rest of a longer previous line.
        pad = " " * max(0, self._length - len(line))
        self._length = 0 if end else len(line)
        sys.stderr.write(f"\r{line}{pad}{end}")
        sys.stderr.flush()

    def bars(self) -> list[Bar]:
        """Return the loops in the running or last cell: the latest one of each name and depth."""
        with self._lock:
            known = [*self._ended, *((loop.cell, loop.snapshot()) for loop in self._open)]
        last = running_cell() or (known[-1][0] if known else 0)
        latest = {(bar.depth, bar.desc): bar for cell, bar in known if cell == last}
        return [latest[key] for key in sorted(latest)]


_loops = _OpenLoops()


def bars() -> list[Bar]:
    """Return the loops of this process in the running or last cell: the latest one of each name and depth."""
    return _loops.bars()


def _is_drawing() -> bool:
    """Whether this process prints progress lines: every rank in a cell, only rank 0 elsewhere."""
    return RUN_ID.get() == "axon_nb" or os.environ.get("RANK", "0") == "0"


def _line(loops: list[Progress[Any]]) -> str:
    """The outermost loop as tqdm draws it, with inner loops in the brackets."""
    outer, *inner = (loop.snapshot() for loop in loops)
    name = f"{outer.desc}: " if outer.desc else ""
    rate = outer.done / outer.seconds if outer.seconds > 0 else 0.0
    pace = f"{rate:.2f}{outer.unit}/s" if rate >= 1 or not rate else f"{1 / rate:.2f}s/{outer.unit}"
    rest = "".join(f", {bar.desc} {_count(bar)}".replace(",  ", ", ") for bar in inner)
    took = _clock(outer.seconds)
    if not outer.total:
        return f"{name}{outer.done}{outer.unit} [{took}, {pace}{rest}]"
    part = min(1.0, outer.done / outer.total)
    full = round(part * _WIDTH)
    left = _clock((outer.total - outer.done) / rate) if rate else "?"
    blocks = "█" * full + " " * (_WIDTH - full)
    return f"{name}{part:4.0%}|{blocks}| {outer.done}/{outer.total} [{took}<{left}, {pace}{rest}]"


def _count(bar: Bar) -> str:
    return f"{bar.done}/{bar.total}" if bar.total else str(bar.done)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
