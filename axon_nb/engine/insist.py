"""Ending code that swallows every interrupt: raising where nothing catches it.

`while True: try: … except: pass` takes whatever is raised within its `try`. Between two rounds there is a line that is
in no `try`, and a trace function sees it come. Private hook: the table of a code object that says which of its parts
are guarded, read by `dis._parse_exception_table`; where that is missing, such a loop goes on until it is given up.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

__all__ = ["desist", "insist", "missing_interrupt_hooks"]

_parse: Callable[[CodeType], list[Any]] | None = getattr(dis, "_parse_exception_table", None)


def missing_interrupt_hooks() -> list[str]:
    """Names of the hooks that this Python does not have."""
    return [] if _parse is not None else ["dis._parse_exception_table"]


def insist(frame: FrameType | None, outermost: FrameType) -> None:
    """Raise KeyboardInterrupt at the first line from here on that no `try` and no `with` guards.

    Args:
        frame: The innermost frame.
        outermost: The frame of the cell; what called it takes the exception.
    """
    if _parse is None:
        return

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not _is_guarded(frame, outermost):
            raise KeyboardInterrupt
        return trace

    while frame is not None:
        frame.f_trace = trace
        if frame is outermost:
            break
        frame = frame.f_back
    sys.settrace(trace)


def desist() -> None:
    """The cell has ended."""
    sys.settrace(None)


def _is_guarded(frame: FrameType | None, outermost: FrameType) -> bool:
    while frame is not None:
        if any(start <= frame.f_lasti < end for start, end in _guarded(frame.f_code)):
            return True
        if frame is outermost:
            return False
        frame = frame.f_back
    return True  # not under the cell: some callback, which is left alone


@functools.lru_cache(maxsize=256)
def _guarded(code: CodeType) -> tuple[tuple[int, int], ...]:
    return tuple((entry.start, entry.end) for entry in _parse(code)) if _parse is not None else ()
