"""Interrupts of the notebook's kernel (SIGINT, such as Jupyter's stop button): none is lost, running cells get them.

ipykernel installs Python's default SIGINT handler around every request. An interrupt in ipykernel's own code, before
the cell's first line or after its last, then ends the request without a reply, and the front end waits forever. While
idle, ipykernel ignores interrupts, even if a cell is already on its way. Private hooks: `pre_handler_hook`,
`post_handler_hook` and `_cancel_on_sigint` of the kernel. If one is missing, ipykernel's own handling stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from axon_nb.errors import AxonError, CellInterrupt
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.stacks import library_of
from axon_nb.shell import user_frame

_INTERRUPT_LINE = "raise KeyboardInterrupt  # the cell was interrupted before its first line"
_INTERRUPT_FILE = "<kernel interrupt>"
_INTERRUPT_CODE = compile(_INTERRUPT_LINE, _INTERRUPT_FILE, "exec")
_IN_FLIGHT_S = 10.0
"""An interrupt that an idle kernel gets is meant for a cell sent before it, if the cell starts within this time: on a
busy machine seconds pass between the two. The time is limited because the page's and the kernel's clocks may differ."""
_FORCE_AFTER_S = 1.0
"""A second interrupt this long after the first raises wherever it lands, as in ipykernel: something there is stuck."""

_SUBSHELL_NOTE = (
    "This cell runs on a subshell, which the stop button does not reach. To interrupt it, press Interrupt in the "
    "panel, or run `%distributed cancel` in the notebook."
)
_GUARDED = (signal.SIGALRM, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals whose handlers may raise while an awaited cell waits."""
_CATCHING = ("IPython.", "ipykernel.", "axon_nb.magics.")
"""Packages whose tasks run cells and requests, and catch KeyboardInterrupt."""


class InterruptQueue:
    """The interrupts since a cell was started; made by `KernelInterrupts.capture`.

    Args:
        has_cancelled: Returns whether an interrupt that came before cancelled the cell: ipykernel's way to report it.
        in_task: Whether the cell runs in a task of the user's own.
    """

    def __init__(self, has_cancelled: Callable[[], bool] = lambda: False, *, in_task: bool = False) -> None:
        self.has_cancelled, self.in_task = has_cancelled, in_task
        self.count = 0
        self.raised: BaseException | None = None
        """What the handler of another signal raised in the event loop while this cell was awaited."""
        self._callback: Callable[[], None] | None = None

    def forward_to(self, callback: Callable[[], None]) -> None:
        """Call `callback` at each interrupt from now on, and at once if there was one already."""
        self._callback = callback
        if self.count:
            callback()

    def put(self) -> None:
        """Record one interrupt."""
        self.count += 1
        if self._callback is not None:
            self._callback()


class KernelInterruptHandler:
    """Handles the interrupts of one kernel that no running `%%distributed` cell captures.

    Args:
        kernel: The kernel of this process.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._handling = ""
        """Type of the request that is being handled; empty when idle."""
        self._pending_at: float | None = None
        """When an interrupt came that has had no effect yet, in Unix time; None: there is none."""
        self._started_at = time.time()
        """When the kernel started to handle the request, in Unix time."""
        self._cancel_on_sigint = kernel._cancel_on_sigint
        self._run_code = kernel.shell.run_code
        self._showtraceback = kernel.shell.showtraceback

    def install(self) -> None:
        """Install the handler; call it on the main thread."""
        lines = [_INTERRUPT_LINE]
        linecache.cache[_INTERRUPT_FILE] = (len(_INTERRUPT_LINE), None, lines, _INTERRUPT_FILE)  # for tracebacks
        self._kernel.pre_handler_hook = self._before_request
        self._kernel.post_handler_hook = self._after_request
        self._kernel._cancel_on_sigint = self._cancel
        self._kernel.shell.run_code = self._run
        self._kernel.shell.showtraceback = self._show
        self._handling = "execute_request"  # the one that loads the extension

    def uninstall(self) -> None:
        """Leave SIGINT to ipykernel again."""
        for name in ("pre_handler_hook", "post_handler_hook", "_cancel_on_sigint"):
            vars(self._kernel).pop(name, None)
        for name in ("run_code", "showtraceback"):
            vars(self._kernel.shell).pop(name, None)
        self._kernel.saved_sigint_handler = signal.SIG_IGN  # for the end of the request that is being handled

    @property
    def is_on_subshell(self) -> bool:
        """Whether the request that this thread handles was sent to a subshell."""
        return bool(self._kernel.get_parent("shell").get("header", {}).get("subshell_id"))

    @property
    def is_pending(self) -> bool:
        """Whether an interrupt came that has had no effect yet, other than cancelling an async cell."""
        return self._pending_at is not None

    def _before_request(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        request = self._kernel.get_parent("shell")
        if request["header"]["msg_type"] == "execute_request" and not self._is_meant_for(request):
            self._pending_at = None
        self._handling, self._started_at = request["header"]["msg_type"], time.time()
        signal.signal(signal.SIGINT, self._on_interrupt)

    def _after_request(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._handling = ""
            signal.signal(signal.SIGINT, self._on_interrupt)

    def _is_meant_for(self, request: dict[str, Any]) -> bool:
        sent = _unix_time(request["header"].get("date"))
        if self._pending_at is None or sent is None or request["content"].get("silent"):
            return False
        return time.time() - self._pending_at < _IN_FLIGHT_S and self._pending_at >= sent

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        first, now = self._pending_at, time.time()
        forced = bool(self._handling) and first is not None and self._started_at <= first < now - _FORCE_AFTER_S
        # IPython's `run_code` also calls `_show`: an interrupt there would leave the first one without a traceback.
        user = user_frame(frame)
        if forced or (user is not None and user.f_code is not KernelInterruptHandler._show.__code__):
            self._pending_at = None
            raise KeyboardInterrupt
        if first is None or first < self._started_at or not self._handling:
            self._pending_at = now

    async def _run(self, code: Any, result: Any = None, *, async_: bool = False) -> Any:
        is_main = threading.current_thread() is threading.main_thread()  # interrupts do not reach subshells
        if self._pending_at is not None and is_main:
            self._pending_at = None
            return await self._run_code(_INTERRUPT_CODE, result)
        return await self._run_code(code, result, async_=async_)

    def _show(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show a traceback as IPython does, without our frames below the user's code."""
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if isinstance(error, (AxonError, CellInterrupt)):  # rich.traceback ignores how they render themselves
            _cut_after_last(error, lambda code: not library_of(code.co_filename))
        elif isinstance(error, KeyboardInterrupt):
            _cut_after_last(error, lambda code: code is not KernelInterruptHandler._on_interrupt.__code__)
        self._showtraceback(exc_tuple, *args, **kwargs)

    @contextlib.contextmanager
    def _cancel(self, future: Any) -> Iterator[None]:
        """Cancel an async cell once, as ipykernel does; an interrupt that comes too late for that stays pending."""
        with self._cancel_on_sigint(future):
            cancel = signal.getsignal(signal.SIGINT)

            def on_interrupt(number: int, frame: FrameType | None) -> None:
                self._pending_at = time.time()
                if callable(cancel):
                    cancel(number, frame)

            signal.signal(signal.SIGINT, on_interrupt)
            try:
                yield
            finally:
                if not _succeeded(future):
                    self._pending_at = None


def _cut_after_last(error: BaseException, is_kept: Callable[[CodeType], bool]) -> None:
    """Leave out the frames of a traceback below the last one that is kept."""
    last, call = None, error.__traceback__
    while call is not None:
        last, call = (call if is_kept(call.tb_frame.f_code) else last), call.tb_next
    if last is not None:
        last.tb_next = None


def _is_in_users_task() -> bool:
    """Whether this runs in a task of the user's own; those in which a kernel runs cells catch KeyboardInterrupt."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return False
    frame = getattr(task.get_coro(), "cr_frame", None) if task is not None else None
    return frame is not None and not frame.f_globals.get("__name__", "").startswith(_CATCHING)


def _unix_time(date: Any) -> float | None:
    """Convert a message's date to Unix time; jupyter_client gives text in some versions, a datetime in others."""
    if isinstance(date, str):
        with contextlib.suppress(ValueError):
            date = dt.datetime.fromisoformat(date)
    return date.timestamp() if isinstance(date, dt.datetime) else None


def _succeeded(future: Any) -> bool:
    return bool(future.done() and not future.cancelled() and not future.exception() and future.result().success)


class KernelInterrupts:
    """The interrupts of one notebook: its running cells get them, and else its kernel's handler."""

    def __init__(self) -> None:
        # Cells that are awaited side by side start and finish in any order: one handler serves them all.
        self._active: list[InterruptQueue] = []
        self._transitioning: list[InterruptQueue] = []
        """Those being added or removed: the handler is installed before they are active, and a little longer."""
        self._previous: Any = None
        self._handler: KernelInterruptHandler | None = None
        self._has_noted_subshell = False
        self._awaited: list[InterruptQueue] = []
        self._guarded: dict[signal.Signals, Any] = {}
        """The user's handlers of other signals, by number, while a cell was last awaited."""

    @contextlib.contextmanager
    def capture(self, *, awaited: bool = False) -> Iterator[InterruptQueue]:
        """Send interrupts to the cell only; outside the main thread there are none.

        Args:
            awaited: Whether the event loop runs meanwhile: what a signal's handler raises there goes to the cell.

        Raises:
            KeyboardInterrupt: at the end, if there was an interrupt and the body did not raise.
            CancelledError: instead, in a task of the user's own: a KeyboardInterrupt there ends the event loop.
        """
        in_task = _is_in_users_task()
        ends_loop = (KeyboardInterrupt, SystemExit) if self._handler is not None else KeyboardInterrupt
        try:
            with self._captured(in_task=in_task) as interrupts, self._guarding(interrupts if awaited else None):
                yield interrupts
        except ends_loop as error:
            if in_task:
                raise asyncio.CancelledError(str(error)) from error
            raise

    @contextlib.contextmanager
    def _guarding(self, interrupts: InterruptQueue | None) -> Iterator[None]:
        """Raise in the awaited cell what handlers of signals raise in the event loop, which would end the kernel."""
        if interrupts is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._awaited:
            for number in _GUARDED:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._on_other:
                    self._guarded[number] = handler
                    signal.signal(number, self._on_other)
        self._awaited.append(interrupts)
        try:
            yield
        finally:
            self._awaited.remove(interrupts)
            for number, handler in self._guarded.items() if not self._awaited else ():
                if signal.getsignal(number) == self._on_other:
                    signal.signal(number, handler)

    def _on_other(self, number: int, frame: FrameType | None) -> None:
        try:
            self._guarded[signal.Signals(number)](number, frame)
        except BaseException as error:
            if not self._awaited or _is_in_users_task():  # whose own error it is
                raise
            for interrupts in self._awaited:
                interrupts.raised = error

    @contextlib.contextmanager
    def _captured(self, *, in_task: bool) -> Iterator[InterruptQueue]:
        interrupts = InterruptQueue(self._has_cancelled, in_task=in_task)
        if threading.current_thread() is not threading.main_thread():
            yield interrupts
            return
        self._transitioning = [interrupts]
        if (previous := signal.signal(signal.SIGINT, self._on_sigint)) != self._on_sigint:
            self._previous = previous
        self._active.append(interrupts)
        self._transitioning = []
        try:
            yield interrupts
        finally:
            self._transitioning = [interrupts]
            self._active.remove(interrupts)
            # A request that came meanwhile has its own handler, if this cell runs in a task.
            if not self._active and signal.getsignal(signal.SIGINT) == self._on_sigint:
                signal.signal(signal.SIGINT, self._previous)
            self._transitioning = []
        if interrupts.count:
            raise KeyboardInterrupt

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        running = [*self._transitioning, *self._active]
        for interrupts in running:
            interrupts.put()
        own = self._previous in (signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL, None)
        if any(interrupts.in_task for interrupts in running) and not own:
            self._previous(number, frame)  # it cancels what awaits the task

    def subshell_note(self) -> str:
        """How to interrupt a cell that is about to run on a subshell; empty for any other, and after the first time."""
        if threading.current_thread() is threading.main_thread() or self._has_noted_subshell:
            return ""
        self._has_noted_subshell = self._handler is not None and self._handler.is_on_subshell
        return _SUBSHELL_NOTE if self._has_noted_subshell else ""

    def _has_cancelled(self) -> bool:
        return self._handler is not None and self._handler.is_pending

    def install(self) -> None:
        """Handle the interrupts of this process's kernel, if there is one; safe to call again."""
        app = sys.modules.get("ipykernel.kernelapp")
        if self._handler is not None or app is None or not app.IPKernelApp.initialized():
            return
        kernel = app.IPKernelApp.instance().kernel
        here = threading.current_thread() is threading.main_thread()
        if here and not missing_hooks("stop_button.presses", kernel=kernel):
            self._handler = KernelInterruptHandler(kernel)
            self._handler.install()

    def uninstall(self) -> None:
        """Undo `install`."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.uninstall()
