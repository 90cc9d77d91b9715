"""`%distributed debug` on a rank: the debugger of IPython on the last failure, one command at a time.

The rank does not wait in a prompt: the notebook reads a command, and sends it as a cell of its own. So the other ranks,
recovery and further cells are never held up, and a command that hangs is interrupted as any cell is.

Kept is the error of the last failed cell, with its frames and what their local variables hold, until the next cell
begins on this rank; nothing after memory ran out, of a cell that was ended from outside, or with ``config debug=off``.
"""

from __future__ import annotations

import io
from types import TracebackType
from typing import Any

from axon_nb.engine import pager
from axon_nb.engine.user_frame import RUN_CODE

__all__ = ["command", "describe", "forget", "keep_error", "start"]

_MAX_TEXT = 200
_kept: list[tuple[BaseException, str]] = []
"""The error, and what it is in a line."""
_debugger: list[Any] = []


def keep_error(error: BaseException) -> None:
    """Keep the error of a failed cell."""
    forget()
    try:
        text = str(error).partition("\n")[0][:_MAX_TEXT]
    except Exception:  # it is the user's code
        text = ""
    _kept.append((error, f"{type(error).__name__}: {text}" if text else type(error).__name__))


def forget() -> None:
    """Let go of what is kept."""
    _close()
    _kept.clear()


def _close() -> None:
    for debugger in _debugger:
        vars(debugger).clear()  # it refers to itself, and to frames in several ways
    _debugger.clear()


def describe(content: dict[str, Any]) -> dict[str, Any]:
    """What is kept, for the control channel: ``kept``, the error in a line, or empty."""
    return {"kept": _kept[0][1] if _kept else ""}


def start() -> str:
    """Open the debugger on what is kept, in the innermost frame; where that is, as the debugger shows it."""
    from IPython.core.debugger import Pdb

    trace = _users_part(_kept[0][0].__traceback__) if _kept else None
    if trace is None:
        return ""
    _close()
    debugger = Pdb(stdout=io.StringIO(), nosigint=True, readrc=False)
    debugger.reset()
    debugger.setup(None, trace)
    _debugger.append(debugger)
    debugger.print_stack_entry(debugger.stack[debugger.curindex])
    return _said(debugger)


def command(line: str) -> tuple[str, bool]:
    """Carry out one command; what the debugger says, and whether that was the last."""
    if not _debugger:
        return "", True
    debugger = _debugger[0]
    try:
        with pager.written_to(debugger.stdout):
            over = bool(debugger.onecmd(debugger.precmd(line)))
            while debugger.cmdqueue and not over:  # `u;; p x`
                over = bool(debugger.onecmd(debugger.precmd(debugger.cmdqueue.pop(0))))
    except BaseException:
        debugger.stdout = io.StringIO()
        raise
    return _said(debugger), over


def _said(debugger: Any) -> str:
    text = str(debugger.stdout.getvalue())
    debugger.stdout = io.StringIO()
    return text


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """From the cell's own frame on; all of it where IPython's is not found."""
    inner = trace
    while inner is not None:
        if inner.tb_frame.f_code is RUN_CODE and inner.tb_next is not None:
            return inner.tb_next
        inner = inner.tb_next
    return trace
