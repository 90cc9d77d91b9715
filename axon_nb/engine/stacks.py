"""The main thread's Python stack from the cell's own frame on, read by another thread at any time."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from typing import Any

from axon_nb.engine.frames import collecting_nothing, main_frame
from axon_nb.engine.interrupts import Interrupts
from axon_nb.engine.libraries import library_of
from axon_nb.engine.session import RankSession
from axon_nb.engine.user_frame import RUN_CODE, user_frame

__all__ = ["cell_stack"]

_MAX_WALK = 5000
_FIRST, _LAST = 15, 25
"""Of a deep stack so many entries are kept at its two ends."""
_MAX_WIDTH = 160

Point = tuple[Any, int]
"""(code object, line)"""


def cell_stack(session: RankSession, interrupts: Interrupts) -> list[dict[str, str]]:
    """Places and source lines, outermost first; those of libraries folded. Empty when no cell runs."""
    if session.cell is None:
        return []
    points = _from_thread() or list(_from_task(interrupts.task))
    entries: list[dict[str, str]] = []
    folded: list[Point] = []
    for code, line in points:
        library = library_of(code.co_filename)
        if library:
            folded.append((code, line))
            continue
        entries += _fold(folded)
        folded = []
        entries.append(_own(session, code, line))
    entries += _fold(folded)
    if len(entries) > _FIRST + _LAST:
        left_out = len(entries) - _FIRST - _LAST
        entries[_FIRST:-_LAST] = [{"place": f"… {left_out:,} more of the user's frames …"}]
    return entries


def _from_thread() -> list[Point]:
    frame = main_frame()
    user = user_frame(frame)
    points: list[Point] = []
    while user is not None and frame is not None and len(points) < _MAX_WALK:
        points.append((frame.f_code, frame.f_lineno))
        if frame is user:
            break
        frame = frame.f_back
    return points[::-1]


def _from_task(task: Any) -> Iterator[Point]:
    """The chain of awaits of an async cell, which is not on the thread's stack while it waits."""
    waiting = task.get_coro() if task is not None and not task.done() else None
    inside = False
    for _ in range(_MAX_WALK):
        with collecting_nothing():
            frame = next((f for n in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(waiting, n, None))), None)
        if frame is None:
            return
        if inside:
            yield frame.f_code, frame.f_lineno
        inside = inside or frame.f_code is RUN_CODE
        names = ("cr_await", "gi_yieldfrom", "ag_await")
        waiting = next((w for n in names if (w := getattr(waiting, n, None)) is not None), None)


def _fold(points: list[Point]) -> list[dict[str, str]]:
    if not points:
        return []
    packages = ", ".join(dict.fromkeys(library_of(code.co_filename) for code, _ in points))
    first, last = points[0][0].co_name, points[-1][0].co_name
    if len(points) == 1:
        return [{"place": f"… 1 frame of {packages}: {first}"}]
    return [{"place": f"… {len(points):,} frames of {packages}: {first} … {last}"}]


def _own(session: RankSession, code: Any, line: int) -> dict[str, str]:
    named = getattr(session.kernel.shell.compile, "format_code_name", lambda name: None)(code.co_filename)
    file = " ".join(named) if named else code.co_filename
    function = "" if code.co_name in ("<module>", "<cell line: 1>") else f", in {code.co_name}"
    source = linecache.getline(code.co_filename, line).strip()
    return {"place": f"{file[-_MAX_WIDTH:]}, line {line}{function[:_MAX_WIDTH]}", "code": source[:_MAX_WIDTH]}
