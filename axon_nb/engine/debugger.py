"""Debuggers of a rank: on its last failure, and where a running cell stops at `breakpoint()`.

The rank never waits at a prompt after a failure (`%distributed debug`): the notebook reads a command and sends it as a
cell. So the other ranks, recovery and further cells are never blocked, and a command that hangs is interrupted like any
cell. At a `breakpoint()`, pdb runs on the main thread; its commands come on the control channel and the answers are
ordinary output, so status, stacks, interrupts and the death of another rank work as in any running cell. An abort ends
the pause.

The error of the last failed cell is saved until the next cell starts on this rank, with its frames and their local
variables. It is not saved after running out of memory, after an abort or with ``config debug=off``.

Nothing else may keep the frames of a failed cell alive, and with them its tensors and DataLoader workers. Python and
IPython each keep the last error for a debugger, and its frames hold all local variables of the cell's functions: after
running out of GPU memory, the next, smaller step would fail too. The text of the traceback exists by then, so both
references are dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import pdb
import queue
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TextIO

from IPython.core.debugger import Pdb
from IPython.display import display

from axon_nb.comm.shared_memory.segment.progress import hold_timeouts
from axon_nb.engine.frames import is_cell, public_call
from axon_nb.engine.session import RankSession, current
from axon_nb.records.environment import PYTHON_BREAKPOINT
from axon_nb.records.protocol.cells import CellFacts, Pauses
from axon_nb.records.protocol.inspection import DebuggerLine, FailureReply, FailureRequest, PausedEvent
from axon_nb.records.protocol.wire import encode, message_type, pack
from axon_nb.records.stacks import library_of
from axon_nb.records.waits import PUBLIC_NAMES
from axon_nb.shell import RUN_CODE, cell_of_file, user_frame

_CELL_FILE_LINE = re.compile(r"^\S*File:\S*\s+\S*<ipython-input-.*\n?", re.MULTILINE)
"""The line that names a cell's file, which does not exist."""
_MAX_TEXT = 200
_LAST_ERROR_NAMES = ("last_exc", "last_traceback", "last_type", "last_value")
_SKIPPED = ("axon_nb.", "IPython.")
"""`step` enters no function of these."""
_PAUSED = message_type(PausedEvent)
_NOWHERE = Pauses()


class Pager:
    """Displays as text what a shell would page; ranks that show the same text share one output."""

    def __init__(self) -> None:
        self._streams: list[TextIO] = []

    def install(self, shell: Any) -> None:
        """Replace the pager of `shell`."""

        def show(shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
            text = data.get("text/plain", "") if isinstance(data, dict) else str(data)
            text = _CELL_FILE_LINE.sub("", text).rstrip()
            if self._streams:
                self._streams[-1].write(f"{text}\n")
            else:
                display({"text/plain": text}, raw=True)

        shell.set_hook("show_in_pager", show, 0)

    @contextlib.contextmanager
    def redirect(self, stream: TextIO) -> Iterator[None]:
        """Write paged text to `stream` instead."""
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.remove(stream)


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


def start_post_mortem() -> str:
    """Open the debugger on this rank; see `PostMortem.start`."""
    return current().post_mortem.start()


def post_mortem_command(line: str) -> tuple[str, bool]:
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


class _Debugger(Pdb):
    """pdb that reads each command with `read`, which returns None to end the cell."""

    def __init__(self, read: Callable[[FrameType], str | None], stdout: Any) -> None:
        super().__init__(stdin=self, stdout=stdout, nosigint=True, readrc=False)
        self.use_rawinput, self.prompt = False, ""
        self._read = read
        self._ended = False

    def readline(self) -> str:
        """Return the next command, as pdb's standard input; an empty one ends the cell."""
        line = None if self._ended else self._read(self.stack[-1][0])
        self._ended = line is None
        return "" if line is None else f"{line}\n"

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Read commands until one lets the cell continue.

        Raises:
            KeyboardInterrupt: the cell is to end.
        """
        super().interaction(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self._ended:  # pdb has answered with `quit`, whose own error would be the user's
            sys.settrace(None)
            raise KeyboardInterrupt

    def pause(self, frame: FrameType) -> None:
        """Read commands now, before the rest of this frame's line runs."""
        self.set_trace(frame)  # type: ignore[no-untyped-call]
        trace = sys.gettrace()
        sys.settrace(None)  # or the debugger would step through itself
        self.interaction(frame, None)
        # Before Python 3.13, assignments of the debugger reach a function's variables only from a trace function.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        if frame.f_trace is not None:  # the command was not `continue`
            sys.settrace(trace)

    def stop_here(self, frame: FrameType) -> bool:
        """Whether to stop in this frame: only in what the cell has called, and not in our own functions."""
        is_ours = str(frame.f_globals.get("__name__")).startswith(_SKIPPED)
        return not is_ours and _is_in_cell(frame) and super().stop_here(frame)  # type: ignore[no-untyped-call]

    # IPython runs each statement of a cell in its own frame: neither its start nor its end is a stop.
    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """Stop at a call, unless it is a statement of the cell."""
        if not _is_statement(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop at a return; at the end of a statement of the cell, go on to the next one."""
        if _is_statement(frame):
            self.set_step()
        else:
            super().user_return(frame, return_value)


class Breakpoints:
    """Where the running cell of this rank pauses, and the debugger that it pauses in.

    Args:
        session: The rank.
        defers: Whether no interrupt may be raised in this frame, such as within an optimizer's step.
    """

    def __init__(self, session: RankSession, defers: Callable[[FrameType | None], bool]) -> None:
        self._session, self._defers = session, defers
        self._stdout = sys.stdout
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._debugger: _Debugger | None = None
        self._run = ""
        self._where = Pauses()
        self._has_skipped = self._released = False
        self._pauses = self._calls = 0

    def install(self) -> None:
        """Have `breakpoint()`, `pdb.set_trace()` and every debugger that would read with `input()` pause the cell."""
        sys.breakpointhook = self._on_breakpoint
        pdb.set_trace = self._set_trace
        # That of IPython, which ipdb opens as well. Ours, and those of programs that send commands, read from a stream.
        shells: Any = Pdb
        base: Any = pdb.Pdb
        set_trace, interaction = shells.set_trace, base.interaction

        def trace(debugger: pdb.Pdb, frame: FrameType | None = None, **options: Any) -> None:
            frame = frame or sys._getframe(1)
            if debugger.use_rawinput:
                self._set_trace(frame)
            else:
                set_trace(debugger, frame, **options)

        def interact(debugger: pdb.Pdb, frame: FrameType | None, error: Any) -> None:
            if debugger.use_rawinput:
                self._post_mortem(frame, error)
            else:
                interaction(debugger, frame, error)

        shells.set_trace, base.interaction = trace, interact

    def begin_cell(self, facts: CellFacts) -> None:
        """Prepare for a cell."""
        if self._pauses or self._released:
            self._lines = queue.SimpleQueue()
        self._run, self._where = facts.run, facts.pauses
        self._has_skipped = self._released = False
        self._pauses = self._calls = 0
        if self._where.at_start:
            sys.settrace(self._trace_start)
        if self._where.before:
            self._session.groups.calls.before = self._before_call

    def end_cell(self) -> None:
        """Close the debugger; afterwards nothing refers to the cell's frames."""
        where, self._where = self._where, _NOWHERE
        if where.at_start:
            sys.settrace(None)
        if where.before:
            self._session.groups.calls.before = None
            if not self._calls:
                print(f"--break {where.before}: the cell made no such call.", file=sys.stderr)
        if self._debugger is not None:
            sys.settrace(None)
            vars(self._debugger).clear()
            self._debugger = None

    def put(self, request: DebuggerLine) -> None:
        """Take a command from the notebook; called on the control thread."""
        if request.run == self._run and request.number == self._pauses:
            self._lines.put(request.line)

    def release(self) -> None:
        """End a pause, and the cell with it; called on the control thread when the cell is aborted."""
        self._released = True
        self._lines.put(None)

    def _on_breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        if PYTHON_BREAKPOINT.get():
            return sys.__breakpointhook__(*args, **kwargs)
        self._set_trace()
        return None

    def _set_trace(self, frame: FrameType | None = None, *, header: str | None = None) -> None:
        if not self._can_pause():
            return
        if header is not None:
            print(header)
        if frame is None:
            frame = sys._getframe(1)
            if frame.f_code.co_filename == __file__:  # breakpoint() has called it
                frame = frame.f_back or frame
        self._open().pause(frame)

    def _post_mortem(self, frame: FrameType | None, error: Any) -> None:
        """Read commands in the frames of an error."""
        if self._can_pause():
            debugger = self._open()
            debugger.reset()
            debugger.interaction(frame, error)

    def _can_pause(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self._skip("it was called in a thread, and the debugger reads its commands in the main one")
        elif not self._where.possible:
            self._skip(
                "only a cell that blocks, in a front end with input(), can be debugged; `%distributed stacks` shows "
                "where each rank is"
            )
        else:
            return True
        return False

    def _open(self) -> _Debugger:
        if self._debugger is None:
            self._debugger = _Debugger(self._wait_for_line, self._stdout)
        return self._debugger

    def _trace_start(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Open the debugger in the cell's own frame, when that is entered."""
        if not _is_statement(frame):
            return None
        self._open().set_trace(frame)  # type: ignore[no-untyped-call]
        return frame.f_trace

    def _before_call(self, operation: str) -> None:
        """Pause before an operation of a process group, if it is the one that the notebook named."""
        frame, where = sys._getframe(1), self._where
        if threading.current_thread() is not threading.main_thread() or user_frame(frame) is None:
            return
        if where.before not in (operation, PUBLIC_NAMES.get(operation, operation), public_call(frame)[0]):
            return
        self._calls += 1
        if where.number in (0, self._calls):
            self._open().pause(_caller(frame))

    def _skip(self, reason: str) -> None:
        if not self._has_skipped:
            self._has_skipped = True
            print(f"breakpoint() skipped: {reason}.", file=sys.stderr)

    def _wait_for_line(self, frame: FrameType) -> str | None:
        """Say that the debugger waits, and return the next command; None if the cell is to end."""
        line = None
        if not self._released:
            self._say_paused(frame)
            self._session.is_paused = True
            hold_timeouts(is_paused=True)
            try:
                line = self._lines.get()
            except KeyboardInterrupt:
                line = None
            finally:
                hold_timeouts(is_paused=False)
                self._session.is_paused = False
        if line is None and self._defers(frame):
            return "continue"  # whoever defers the interrupt raises it
        return line

    def _say_paused(self, frame: FrameType) -> None:
        self._pauses += 1
        file = frame.f_code.co_filename
        within = "" if cell_of_file(file) else f"{os.path.basename(file)} "
        event = PausedEvent(self._pauses, f"{within}line {frame.f_lineno}")
        kernel = self._session.kernel
        self._stdout.flush()
        kernel.session.send(
            kernel.iopub_socket,
            _PAUSED,
            pack(encode(event)),
            parent=kernel.get_parent("shell"),
            ident=f"engine.{kernel.engine_id}.{_PAUSED}".encode(),
        )


def _caller(frame: FrameType) -> FrameType:
    """The innermost frame of the user's code."""
    while frame.f_back is not None and library_of(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_statement(frame: FrameType) -> bool:
    """Whether this is the frame in which IPython runs a statement of the cell."""
    return frame.f_back is not None and frame.f_back.f_code is RUN_CODE and is_cell(frame.f_code)


def _is_in_cell(frame: FrameType | None) -> bool:
    while frame is not None and not _is_statement(frame):
        frame = frame.f_back
    return frame is not None
