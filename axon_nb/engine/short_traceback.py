"""One line instead of a traceback for a rank whose cell was ended from outside.

Rendering a traceback takes 100-400 ms, on every rank at once, and says only where torch waits.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from axon_nb.engine.collective_functions import is_public_call
from axon_nb.engine.groups.abort import Aborted
from axon_nb.engine.user_frame import RUN_CODE

__all__ = ["find_place", "install_short_traceback", "take_place"]

_place: dict[str, Any] = {}


def install_short_traceback(shell: Any) -> None:
    """Have `shell` show one line when a cell was aborted or interrupted."""

    def show(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None) -> Any:
        line, call = find_place(trace)
        _place.update(line=line, call=call)
        text = [f"{kind.__name__} at line {line}: {error}"]
        shell._showtraceback(kind, error, text)
        return text

    shell.set_custom_exc((Aborted, KeyboardInterrupt, asyncio.CancelledError), show)


def take_place() -> dict[str, Any]:
    """Where the last ended cell was: {"line": …, "call": …}; empty when it was not ended from outside."""
    place = dict(_place)
    _place.clear()
    return place


def find_place(trace: TracebackType | None) -> tuple[int | None, str]:
    """The cell's line, and the function of torch.distributed that it had called, in a traceback."""
    line, call = None, ""
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_back is not None and frame.f_back.f_code is RUN_CODE:
            line = trace.tb_lineno
        code = frame.f_code
        if not call and is_public_call(code):
            call = code.co_name
        trace = trace.tb_next
    return line, call
