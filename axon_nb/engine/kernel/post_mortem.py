"""`%distributed debug` on a rank: the debugger of IPython on the last failure, one command at a time.

The rank does not wait in a prompt: the notebook reads a command, and sends it as a cell of its own. So the other ranks,
recovery and further cells are never held up, and a command that hangs is interrupted as any cell is.

Kept is the error of the last failed cell, with its frames and what their local variables hold, until the next cell
begins on this rank; nothing after memory ran out, of a cell that was ended from outside, or with ``config debug=off``.

After a failed cell: nothing keeps its frames, and with them its tensors and DataLoader workers, alive for long.

Python and IPython each keep the last error for a debugger, and its frames hold all that the cell's functions had in
local variables: after running out of GPU memory the next, smaller step would fail too. The text of the traceback has
been made by then. Only the debugger is left the last error, until the next cell begins; see `post_mortem`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import Any

from axon_nb.engine.kernel import shell
from axon_nb.engine.user_frame import RUN_CODE
from axon_nb.records.protocol.cells import FailureReply, FailureRequest

__all__ = ["command", "describe", "forget", "keep_error", "release_failure", "start"]

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


def describe(asked: FailureRequest) -> FailureReply:
    """What is kept, for the control channel."""
    return FailureReply(_kept[0][1] if _kept else "")


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
        with shell.written_to(debugger.stdout):
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


_NAMES = ("last_exc", "last_traceback", "last_type", "last_value")


def release_failure(shell: Any, *, from_outside: bool, keep: bool = False) -> None:
    """Drop what `shell` and `sys` hold of the last error; what the user's own names hold of it stays.

    Frames that refer to their own error, as after ``except E as e: errors.append(e)``, go with the next collection of
    garbage. When memory ran out they are emptied here: a thread that samples stacks may hold one for a moment, and the
    collection made then would pass it by.

    Args:
        shell: The rank's IPython shell.
        from_outside: Whether the cell was ended by an interrupt or an abort: its frames are emptied then, in a thread,
            as a DataLoader waits seconds for busy workers.
        keep: Whether the error is left to the debugger until the next cell; never after memory ran out.
    """
    result = getattr(shell, "last_execution_result", None)
    error = getattr(result, "error_in_exec", None)
    short = _out_of_memory(error)
    _clear_outermost(error)
    if result is not None:
        result.error_in_exec = result.error_before_exec = None
    shell.last_execution_result = None
    for name in _NAMES:
        vars(sys).pop(name, None)
    for name in ("InteractiveTB", "SyntaxTB"):
        if getattr(getattr(shell, name, None), "tb", None) is not None:
            getattr(shell, name).tb = None
    if keep and error is not None and not from_outside and not short:
        keep_error(error)
    if from_outside and error is not None:
        threading.Thread(target=_clear_all, args=(error,), name="axon_nb-release", daemon=True).start()
    if short:
        _clear_all(error)
    del error
    if short:
        gc.collect()


def _clear_outermost(error: BaseException | None) -> None:
    # IPython's own frame is the first of the error's, and holds the error: without it nothing refers to itself.
    trace = error.__traceback__ if error is not None else None
    if trace is not None and trace.tb_frame.f_code is RUN_CODE:
        _clear_callers(trace.tb_frame)
    while trace is not None:
        if trace.tb_frame.f_code is RUN_CODE:
            with contextlib.suppress(RuntimeError):  # it still runs
                trace.tb_frame.clear()
        trace = trace.tb_next


def _clear_callers(frame: FrameType) -> None:
    # From Python 3.12 on, a coroutine's frame that has ended still refers to the frame that ran it. So the error's
    # frames hold those of IPython and ipykernel, which hold the error. The first frame that still runs is ours.
    caller = frame.f_back
    while caller is not None:
        try:
            caller.clear()
        except RuntimeError:
            return
        caller = caller.f_back


def _clear_all(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)  # frames that still run are left alone
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _out_of_memory(error: BaseException | None) -> bool:
    # By name and not by text: `str` of an error is the user's code.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
