"""Presses of the stop button (SIGINT) while a cell is sent, runs and ends: counted, and handed to the cell.

The stop button in the notebook's own kernel: a press in a cell's first or last milliseconds is not lost.

ipykernel takes SIGINT with Python's default handler around every request: a press that lands in its own code, before
the cell's first line or after its last, ends the request without a reply, and the front end waits for ever. And it
ignores presses while it is idle, a cell that is on its way to it included. Private hooks: `pre_handler_hook`,
`post_handler_hook` and `_cancel_on_sigint` of the kernel; where one is missing ipykernel's own ways are left.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from axon_nb.engine.user_frame import user_frame
from axon_nb.records.hooks import missing_hooks

__all__ = ["Presses", "StopButton", "caught", "install", "uninstall"]


class Presses:
    """The presses since a cell was begun; made by `caught`."""

    def __init__(self) -> None:
        self.count = 0
        self._heed: Callable[[], None] | None = None

    def hand_to(self, heed: Callable[[], None]) -> None:
        """Have `heed` called at each press from now on; at once if there was one already."""
        self._heed = heed
        if self.count:
            heed()

    def press(self) -> None:
        """The button was pressed."""
        self.count += 1
        if self._heed is not None:
            self._heed()


# Cells that are awaited side by side begin and end in any order: one handler serves them all.
_active: list[Presses] = []
_turning: list[Presses] = []
"""Those that come or go: the handler is in place before they are active, and a little longer."""
_previous: list[Any] = []


@contextlib.contextmanager
def caught() -> Iterator[Presses]:
    """From here on a press interrupts nothing but the cell; elsewhere than on the main thread there are none.

    Raises:
        KeyboardInterrupt: at the end, when the button was pressed and what was done in between did not fail.
    """
    presses = Presses()
    if threading.current_thread() is not threading.main_thread():
        yield presses
        return
    _turning[:] = [presses]
    if not _active:
        _previous[:] = [signal.signal(signal.SIGINT, _on_sigint)]
    _active.append(presses)
    _turning.clear()
    try:
        yield presses
    finally:
        _turning[:] = [presses]
        _active.remove(presses)
        if not _active:
            signal.signal(signal.SIGINT, _previous.pop())
        _turning.clear()
    if presses.count:
        raise KeyboardInterrupt


def _on_sigint(number: int, frame: Any) -> None:
    for presses in [*_turning, *_active]:
        presses.press()


_STOP_LINE = "raise KeyboardInterrupt  # the stop button was pressed before the cell's first line"
_STOP = compile(_STOP_LINE, "<stop button>", "exec")
_ON_ITS_WAY_S = 10.0
"""A press that an idle kernel gets is meant for a cell that was sent before it, if the cell begins within this time: on
a busy machine seconds pass between the two. It has a limit as clocks of the page and of the kernel may differ."""
_INSIST_S = 1.0
"""A second press after so long raises wherever it lands, as ipykernel would have it: something there does not end."""


class StopButton:
    """Takes the presses of one kernel that no running cell takes.

    Args:
        kernel: The kernel of this process.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._handling = ""
        """Type of the request that is being handled; empty when idle."""
        self._pressed: float | None = None
        """When the button was pressed without effect, in Unix time; None: it was not."""
        self._began = time.time()
        """When it began to be handled, in Unix time."""
        self._cancel_on_sigint = kernel._cancel_on_sigint
        self._run_code = kernel.shell.run_code
        self._showtraceback = kernel.shell.showtraceback

    def install(self) -> None:
        """Take over; call it on the main thread."""
        linecache.cache["<stop button>"] = (len(_STOP_LINE), None, [_STOP_LINE], "<stop button>")  # for tracebacks
        self._kernel.pre_handler_hook = self._before
        self._kernel.post_handler_hook = self._after
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

    def _before(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        request = self._kernel.get_parent("shell")
        if request["header"]["msg_type"] == "execute_request" and not self._is_meant_for(request):
            self._pressed = None
        self._handling, self._began = request["header"]["msg_type"], time.time()
        signal.signal(signal.SIGINT, self._on_press)

    def _after(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._handling = ""
            signal.signal(signal.SIGINT, self._on_press)

    def _is_meant_for(self, request: dict[str, Any]) -> bool:
        sent = _moment(request["header"].get("date"))
        if self._pressed is None or sent is None or request["content"].get("silent"):
            return False
        return time.time() - self._pressed < _ON_ITS_WAY_S and self._pressed >= sent

    def _on_press(self, number: int, frame: FrameType | None) -> None:
        first, now = self._pressed, time.time()
        insisted = bool(self._handling) and first is not None and self._began <= first < now - _INSIST_S
        if insisted or user_frame(frame) is not None:
            self._pressed = None
            raise KeyboardInterrupt
        if first is None or first < self._began or not self._handling:
            self._pressed = now

    async def _run(self, code: Any, result: Any = None, *, async_: bool = False) -> Any:
        if self._pressed is not None:
            self._pressed = None
            return await self._run_code(_STOP, result)
        return await self._run_code(code, result, async_=async_)

    def _show(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """As IPython's; a press that landed in the user's code is shown there, without the handler that raised."""
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        call = error.__traceback__ if isinstance(error, KeyboardInterrupt) else None
        while call is not None and call.tb_next is not None:
            if call.tb_next.tb_frame.f_code is StopButton._on_press.__code__:
                call.tb_next = None
            else:
                call = call.tb_next
        self._showtraceback(exc_tuple, *args, **kwargs)

    @contextlib.contextmanager
    def _cancel(self, future: Any) -> Iterator[None]:
        """As ipykernel's, which cancels an async cell once; a press that comes too late for that is kept."""
        with self._cancel_on_sigint(future):
            cancel = signal.getsignal(signal.SIGINT)

            def on_press(number: int, frame: FrameType | None) -> None:
                self._pressed = time.time()
                if callable(cancel):
                    cancel(number, frame)

            signal.signal(signal.SIGINT, on_press)
            try:
                yield
            finally:
                if not _succeeded(future):
                    self._pressed = None


def _moment(date: Any) -> float | None:
    """A message's date in Unix time; text in some versions of jupyter_client, a datetime in others."""
    if isinstance(date, str):
        with contextlib.suppress(ValueError):
            date = dt.datetime.fromisoformat(date)
    return date.timestamp() if isinstance(date, dt.datetime) else None


def _succeeded(future: Any) -> bool:
    return bool(future.done() and not future.cancelled() and not future.exception() and future.result().success)


_installed: list[StopButton] = []


def install() -> None:
    """Take over the stop button of this process's kernel, if it runs in one; safe to call again."""
    app = sys.modules.get("ipykernel.kernelapp")
    if _installed or app is None or not app.IPKernelApp.initialized():
        return
    kernel = app.IPKernelApp.instance().kernel
    here = threading.current_thread() is threading.main_thread()
    if here and not missing_hooks("stop_button.presses", kernel=kernel):
        _installed.append(StopButton(kernel))
        _installed[0].install()


def uninstall() -> None:
    """Take back what `install` did."""
    while _installed:
        _installed.pop().uninstall()
