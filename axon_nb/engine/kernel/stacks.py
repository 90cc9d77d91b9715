"""Reads the main thread's Python stack from the cell's frame on, from another thread at any time.

Classifies files as library or user code, and finds threads that may still communicate while the main thread waits or
after it has finished the cell.
"""

from __future__ import annotations

import linecache
import os
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

from axon_nb.engine.frames import code_by_thread, gc_paused, main_frame
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.session import RankSession
from axon_nb.records.stacks import StackFrame, library_of
from axon_nb.shell.user_frame import RUN_CODE, user_frame

_MAX_FRAMES = 5000
_FIRST_FRAMES, _LAST_FRAMES = 15, 25
"""Entries shown from each end of a deep stack."""
_MAX_WIDTH = 160

Point = tuple[Any, int]
"""(code object, line)"""
_COMMUNICATES = os.path.join("", "torch", "distributed", "")


def cell_stack(session: RankSession, interrupts: InterruptHandler) -> list[StackFrame]:
    """Locations and source lines, outermost first, with library frames folded; empty if no cell runs."""
    if session.cell is None:
        return []
    points = _thread_stack() or list(_await_chain(interrupts.task))
    entries: list[StackFrame] = []
    folded: list[Point] = []
    for code, line in points:
        library = library_of(code.co_filename)
        if library:
            folded.append((code, line))
            continue
        entries += _fold(folded)
        folded = []
        entries.append(_user_entry(session, code, line))
    entries += _fold(folded)
    if len(entries) > _FIRST_FRAMES + _LAST_FRAMES:
        left_out = len(entries) - _FIRST_FRAMES - _LAST_FRAMES
        entries[_FIRST_FRAMES:-_LAST_FRAMES] = [StackFrame(f"… {left_out:,} more user frames …")]
    return entries


def _thread_stack() -> list[Point]:
    frame = main_frame()
    user = user_frame(frame)
    points: list[Point] = []
    while user is not None and frame is not None and len(points) < _MAX_FRAMES:
        points.append((frame.f_code, frame.f_lineno))
        if frame is user:
            break
        frame = frame.f_back
    return points[::-1]


def _await_chain(task: Any) -> Iterator[Point]:
    """The await chain of an async cell, which is not on the thread's stack while it waits."""
    waiting = task.get_coro() if task is not None and not task.done() else None
    inside = False
    for _ in range(_MAX_FRAMES):
        with gc_paused():
            frame = next((f for n in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(waiting, n, None))), None)
        if frame is None:
            return
        if inside:
            yield frame.f_code, frame.f_lineno
        inside = inside or frame.f_code is RUN_CODE
        names = ("cr_await", "gi_yieldfrom", "ag_await")
        waiting = next((w for n in names if (w := getattr(waiting, n, None)) is not None), None)


def _fold(points: list[Point]) -> list[StackFrame]:
    if not points:
        return []
    packages = ", ".join(dict.fromkeys(library_of(code.co_filename) for code, _ in points))
    first, last = points[0][0].co_name, points[-1][0].co_name
    if len(points) == 1:
        return [StackFrame(f"… 1 frame of {packages}: {first}")]
    return [StackFrame(f"… {len(points):,} frames of {packages}: {first} … {last}")]


def _user_entry(session: RankSession, code: Any, line: int) -> StackFrame:
    name_parts = getattr(session.kernel.shell.compile, "format_code_name", lambda name: None)(code.co_filename)
    file = " ".join(name_parts) if name_parts else code.co_filename
    function = "" if code.co_name in ("<module>", "<cell line: 1>") else f", in {code.co_name}"
    source = linecache.getline(code.co_filename, line).strip()
    return StackFrame(f"{file[-_MAX_WIDTH:]}, line {line}{function[:_MAX_WIDTH]}", source[:_MAX_WIDTH])


def user_threads() -> list[str]:
    """Names of threads that currently run user code, communicate, or wait to start (`threading.Timer`).

    Library threads (data loaders, progress bars, log writers) run no user code. An idle thread of a pool gets work only
    from user code, so it counts only while that runs.
    """
    running = code_by_thread()
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and not thread.name.startswith("axon_nb")
        and (isinstance(thread, threading.Timer) or any(map(_may_communicate, running.get(thread.ident or 0, ()))))
    ]


def _may_communicate(code: CodeType) -> bool:
    return not library_of(code.co_filename) or _COMMUNICATES in code.co_filename
