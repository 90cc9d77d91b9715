"""Pauses a cell at `breakpoint()`: pdb on the main thread of the rank, with commands that the notebook sends.

The commands come on the control channel and the answers are ordinary output, so nothing else waits: status, stacks,
interrupts and the death of another rank work as in any running cell. An abort ends the pause.
"""

from __future__ import annotations

import ctypes
import os
import pdb
import queue
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from IPython.core.debugger import Pdb

from axon_nb.comm.shared_memory.segment.progress import hold_timeouts
from axon_nb.engine.collective_names import public_call
from axon_nb.engine.session import RankSession
from axon_nb.records.environment import PYTHON_BREAKPOINT
from axon_nb.records.protocol.cells import CellFacts, Pauses
from axon_nb.records.protocol.inspection import DebuggerLine, PausedEvent
from axon_nb.records.protocol.messages import message_type
from axon_nb.records.protocol.wire import encode
from axon_nb.records.stacks import library_of
from axon_nb.records.waits.functions import PUBLIC_NAMES
from axon_nb.shell.user_frame import RUN_CODE, cell_of_file, user_frame

_SKIPPED = ("axon_nb.", "IPython.")
"""`step` enters no function of these."""
_PAUSED = message_type(PausedEvent)
_NOWHERE = Pauses()


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
            encode(event),
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
    return frame.f_back is not None and frame.f_back.f_code is RUN_CODE and frame.f_code.co_name == "<module>"


def _is_in_cell(frame: FrameType | None) -> bool:
    while frame is not None and not _is_statement(frame):
        frame = frame.f_back
    return frame is not None
