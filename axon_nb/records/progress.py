"""How far a loop is: `axon_nb.progress`. A row in the output as tqdm draws it, and a bar over all ranks in `%watch`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from axon_nb.errors import UsageError
from axon_nb.records.environment import RUN_ID
from axon_nb.records.running_cell import running_cell

__all__ = ["Bar", "Progress", "bars", "progress"]

Item = TypeVar("Item")

_REDRAW_S = 0.1
_KEPT = 16
_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Bar:
    """One loop on one rank, at one moment."""

    desc: str
    """Its name; may be empty."""
    depth: int
    """In how many other such loops it is."""
    done: int
    """Items that are worked off."""
    total: int | None
    """Items that there are; None: not known."""
    seconds: float
    """Since its begin."""
    is_over: bool
    """Whether it has ended, early or not."""
    unit: str = "it"
    """What an item is called."""


class Progress(Generic[Item]):
    """The items of an iterable, counted as they are worked off; made by `progress`."""

    def __init__(self, iterable: Iterable[Item], *, total: int | None, desc: str, unit: str) -> None:
        self._iterable = iterable
        self.total = len(iterable) if total is None and isinstance(iterable, Sized) else total
        self.desc = desc
        self.unit = unit
        self.done = 0
        self.depth = 0
        self.cell = 0
        self._began = time.monotonic()
        self._ended: float | None = None

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError(f"{type(self._iterable).__name__} has no length; progress(…, total=N) would tell it")
        return self.total

    def __iter__(self) -> Iterator[Item]:
        self.done, self._began, self._ended, self.cell = 0, time.monotonic(), None, running_cell()
        _begin(self)
        try:
            for item in self._iterable:
                yield item
                self.done += 1
                _redraw()
        finally:
            self._ended = time.monotonic()
            _end(self)

    def look(self) -> Bar:
        """How far it is now."""
        end = time.monotonic() if self._ended is None else self._ended
        over = self._ended is not None
        return Bar(self.desc, self.depth, self.done, self.total, end - self._began, over, self.unit)


def progress(iterable: Iterable[Item], *, total: int | None = None, desc: str = "", unit: str = "it") -> Progress[Item]:
    """Count the items of a loop as they are worked off: `for batch in axon_nb.progress(loader):`.

    In a cell each rank draws a row, equal ones are one, and `%watch` draws one bar over all ranks that tells the
    slowest; under torchrun rank 0 draws the row.

    Args:
        iterable: What is looped over.
        total: How many items there are; None: its length, if it has one.
        desc: What the bar is called.
        unit: What an item is called.

    Raises:
        UsageError: it cannot be looped over.
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise UsageError(f"progress({type(iterable).__name__}): it is looped over, as in progress(range(10)).")
    return Progress(iterable, total=total, desc=desc, unit=unit)


_lock = threading.RLock()
_open: list[Progress[Any]] = []
_ended: deque[tuple[int, Bar]] = deque(maxlen=_KEPT)
"""The cell of each loop that is over, and how far it came; what it was over is not kept."""
_drawn = [0.0, 0.0]
"""When a row was drawn last, and how long it was."""


def bars() -> list[Bar]:
    """The loops of the cell that runs, or ran last, in this process: the last one of each name and depth."""
    with _lock:
        known = [*_ended, *((loop.cell, loop.look()) for loop in _open)]
    last = running_cell() or (known[-1][0] if known else 0)
    found = {(bar.depth, bar.desc): bar for cell, bar in known if cell == last}
    return [found[key] for key in sorted(found)]


def _begin(bar: Progress[Any]) -> None:
    with _lock:
        bar.depth = len(_open)
        _open.append(bar)
    _redraw()


def _end(bar: Progress[Any]) -> None:
    with _lock:
        if bar in _open:
            _open.remove(bar)
        _ended.append((bar.cell, bar.look()))
        if not _open and _draws():
            _draw(_row([bar]), "\n")


def _draws() -> bool:
    """Whether this process draws rows: every rank in a cell, rank 0 elsewhere."""
    return RUN_ID.get() == "axon_nb" or os.environ.get("RANK", "0") == "0"


def _redraw() -> None:
    now = time.monotonic()
    if now - _drawn[0] < _REDRAW_S:
        return
    with _lock:
        _drawn[0] = now
        if _open and _draws():
            _draw(_row(_open), "")


def _draw(row: str, end: str) -> None:
    # The rest of a longer row before it is blanked out.
    pad = " " * max(0, int(_drawn[1]) - len(row))
    _drawn[1] = 0 if end else len(row)
    sys.stderr.write(f"\r{row}{pad}")
    if end:
        sys.stderr.write(end)
    sys.stderr.flush()


def _row(loops: list[Progress[Any]]) -> str:
    """The outermost loop as tqdm draws it, with the inner ones in its brackets."""
    outer, *inner = (loop.look() for loop in loops)
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
