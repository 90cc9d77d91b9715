"""Runs `%distributed debug` on a rank: IPython's debugger on the last failure, one command at a time.

The rank does not wait at a prompt: the notebook reads a command and sends it as a cell. So the other ranks, recovery
and further cells are never blocked, and a command that hangs is interrupted like any cell.

The error of the last failed cell is saved until the next cell starts on this rank, with its frames and their local
variables. It is not saved after running out of memory, after an abort or with ``config debug=off``.

Nothing else may keep the frames of a failed cell alive, and with them its tensors and DataLoader workers. Python and
IPython each keep the last error for a debugger, and its frames hold all local variables of the cell's functions: after
running out of GPU memory, the next, smaller step would fail too. The text of the traceback exists by then, so both
references are dropped.
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

from axon_nb.engine.debugger.pager import Pager
from axon_nb.engine.session import current
from axon_nb.records.protocol.inspection import FailureReply, FailureRequest
from axon_nb.shell.user_frame import RUN_CODE

_MAX_TEXT = 200
_LAST_ERROR_NAMES = ("last_exc", "last_traceback", "last_type", "last_value")


class PostMortem:
    """The error of the last failed cell of this rank, and the debugger that is open on it."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._error: BaseException | None = None
        self._description = ""
        """The error in one line."""
        self._debugger: Any = None
        """IPython's debugger, which has no types; None while it is closed."""

    def save(self, error: BaseException, text: str) -> None:
        """Save the error of a failed cell for the debugger.

        Args:
            error: The error.
            text: Its text; `str` would run the user's code again.
        """
        self.discard()
        text = text.partition("\n")[0][:_MAX_TEXT]
        self._error = error
        self._description = f"{type(error).__name__}: {text}" if text else type(error).__name__

    def discard(self) -> None:
        """Discard the saved error."""
        self._close()
        self._error, self._description = None, ""

    def _close(self) -> None:
        if self._debugger is not None:
            vars(self._debugger).clear()  # it refers to itself and, in several ways, to frames
        self._debugger = None

    def report(self, request: FailureRequest) -> FailureReply:
        """Answer `FailureRequest` with the saved error in one line, or with an empty text."""
        return FailureReply(self._description)

    def start(self) -> str:
        """Open the debugger in the innermost frame of the saved error; return the position as the debugger shows it."""
        from IPython.core.debugger import Pdb

        trace = _from_user_frame(self._error.__traceback__) if self._error is not None else None
        if trace is None:
            return ""
        self._close()
        debugger = Pdb(stdout=io.StringIO(), nosigint=True, readrc=False)
        debugger.reset()
        debugger.setup(None, trace)
        self._debugger = debugger
        debugger.print_stack_entry(debugger.stack[debugger.curindex])
        return _take_output(debugger)

    def command(self, line: str) -> tuple[str, bool]:
        """Run one debugger command; return its output, and whether the session is over."""
        debugger = self._debugger
        if debugger is None:
            return "", True
        try:
            with self._pager.redirect(debugger.stdout):
                is_done = bool(debugger.onecmd(debugger.precmd(line)))
                while debugger.cmdqueue and not is_done:  # `u;; p x`
                    is_done = bool(debugger.onecmd(debugger.precmd(debugger.cmdqueue.pop(0))))
        except BaseException:
            debugger.stdout = io.StringIO()
            raise
        return _take_output(debugger), is_done

    def release(self, shell: Any, *, was_aborted: bool, keep_text: str | None = None) -> None:
        """Drop the references of `shell` and `sys` to the last error; those of the user's own variables stay.

        Frames that refer to their own error, as after ``except E as e: errors.append(e)``, are freed by the next
        garbage collection. After running out of memory, frames are cleared here: a thread that samples stacks may
        briefly hold one, and a collection at that moment would miss it.

        Args:
            shell: The rank's IPython shell.
            was_aborted: Whether the cell was interrupted or aborted. Its frames are then cleared in a thread, because a
                DataLoader waits seconds for busy workers.
            keep_text: Text under which to save the error for the debugger until the next cell; None: do not save it. It
                is not saved after running out of memory either.
        """
        result = getattr(shell, "last_execution_result", None)
        error = getattr(result, "error_in_exec", None)
        out_of_memory = _out_of_memory(error)
        _clear_outermost(error)
        if result is not None:
            result.error_in_exec = result.error_before_exec = None
        shell.last_execution_result = None
        for name in _LAST_ERROR_NAMES:
            vars(sys).pop(name, None)
        for name in ("InteractiveTB", "SyntaxTB"):
            if getattr(getattr(shell, name, None), "tb", None) is not None:
                getattr(shell, name).tb = None
        if keep_text is not None and error is not None and not was_aborted and not out_of_memory:
            self.save(error, keep_text)
        if was_aborted and error is not None:
            threading.Thread(target=_clear_chain, args=(error,), name="axon_nb-release", daemon=True).start()
        if out_of_memory:
            _clear_chain(error)
        del error
        if out_of_memory:
            gc.collect()


def start() -> str:
    """Open the debugger on this rank; see `PostMortem.start`."""
    return current().post_mortem.start()


def command(line: str) -> tuple[str, bool]:
    """Run one command of this rank's debugger; see `PostMortem.command`."""
    return current().post_mortem.command(line)


def _take_output(debugger: Any) -> str:
    text = str(debugger.stdout.getvalue())
    debugger.stdout = io.StringIO()
    return text


def _from_user_frame(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the cell's own frame on; all of it if IPython's frame is not found."""
    inner = trace
    while inner is not None:
        if inner.tb_frame.f_code is RUN_CODE and inner.tb_next is not None:
            return inner.tb_next
        inner = inner.tb_next
    return trace


def _clear_outermost(error: BaseException | None) -> None:
    # IPython's own frame is the error's first, and holds the error: clearing it breaks the cycle.
    trace = error.__traceback__ if error is not None else None
    if trace is not None and trace.tb_frame.f_code is RUN_CODE:
        _clear_callers(trace.tb_frame)
    while trace is not None:
        if trace.tb_frame.f_code is RUN_CODE:
            with contextlib.suppress(RuntimeError):  # still running
                trace.tb_frame.clear()
        trace = trace.tb_next


def _clear_callers(frame: FrameType) -> None:
    # Since Python 3.12, the frame of a finished coroutine still refers to the frame that ran it. So the error's frames
    # hold those of IPython and ipykernel, which hold the error. The first frame that still runs is ours.
    caller = frame.f_back
    while caller is not None:
        try:
            caller.clear()
        except RuntimeError:
            return
        caller = caller.f_back


def _clear_chain(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)  # running frames are skipped
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _out_of_memory(error: BaseException | None) -> bool:
    # By name, not by text: `str` of an error runs the user's code.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
