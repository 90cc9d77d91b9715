"""Bars of plain tqdm on this rank, read when somebody looks. Private hooks: tqdm's set of open bars and its `close`.

Where they are missing such bars are drawn in the cell's output as ever, and not in `%watch`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from axon_nb.records.progress import Bar
from axon_nb.records.running_cell import running_cell

__all__ = ["missing_tqdm_hooks", "tqdm_bars"]

_KEPT = 16
_closed: deque[tuple[int, Bar]] = deque(maxlen=_KEPT)
_hooked: list[type] = []


def missing_tqdm_hooks() -> list[str]:
    """Names of the hooks that this tqdm does not have; empty when it is not loaded."""
    kind = _kind()
    return [name for name in ("_instances", "close") if kind is not None and not hasattr(kind, name)]


def _kind() -> Any:
    return getattr(sys.modules.get("tqdm.std"), "tqdm", None)


def tqdm_bars() -> list[Bar]:
    """The open bars, and those that were closed in this cell since somebody looked first."""
    kind = _kind()
    if kind is None or missing_tqdm_hooks():
        return []
    if kind not in _hooked:
        _hook(kind)
    cell = running_cell()
    closed = list(_closed)
    last = cell or (closed[-1][0] if closed else 0)
    found = {(bar.depth, bar.desc): bar for number, bar in closed if number == last}
    for bar in sorted(_living(kind), key=lambda bar: getattr(bar, "start_t", 0.0)):
        look = _look(bar, is_over=False)
        found[look.depth, look.desc] = look
    return [found[key] for key in sorted(found)]


def _living(kind: Any) -> list[Any]:
    for _ in range(3):
        try:
            return [bar for bar in kind._instances if not bar.disable and hasattr(bar, "start_t")]
        except RuntimeError:  # the main thread has begun or ended a bar meanwhile
            continue
    return []


def _look(bar: Any, *, is_over: bool) -> Bar:
    total = None if bar.total is None else int(bar.total)
    seconds = max(0.0, time.time() - bar.start_t)
    depth = abs(int(getattr(bar, "pos", 0) or 0))
    return Bar((bar.desc or "").rstrip(": "), depth, int(bar.n), total, seconds, is_over, str(bar.unit))


def _hook(kind: Any) -> None:
    """Have bars tell how far they came when they are closed."""
    _hooked.append(kind)
    close = kind.close

    def close_and_tell(self: Any) -> Any:
        if not self.disable and hasattr(self, "start_t"):
            _closed.append((running_cell(), _look(self, is_over=True)))
        return close(self)

    close_and_tell.__doc__ = close.__doc__
    kind.close = close_and_tell
