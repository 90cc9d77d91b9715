"""Progress of loops (`axon_nb.progress`): a tqdm-style line in the output, and a bar over all ranks in `%watch`."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, SupportsIndex, TypeVar

from axon_nb.errors import UsageError
from axon_nb.records.environment import RUN_ID
from axon_nb.records.telemetry import running_cell

Item = TypeVar("Item")

_REDRAW_S = 0.1
_MAX_FINISHED = 16
_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Bar:
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
