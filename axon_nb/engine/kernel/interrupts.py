"""Handles SIGINT on a rank: an interrupt stops the user's code and nothing else, not even an optimizer's step.

Code that swallows every interrupt is interrupted where nothing can catch it. `while True: try: … except: pass` catches
whatever is raised inside its `try`. But between two iterations there is a line outside any `try`, and a trace function
sees it. Private hook: a code object's exception table, read by `dis._parse_exception_table`; without it, such a loop
runs until the rank is replaced.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from axon_nb.engine.frames import step_depth
from axon_nb.engine.groups import recovery
from axon_nb.engine.session import current
from axon_nb.engine.sharding import unreplicated_parameters, unreplicated_reason
from axon_nb.records.protocol.recovery import OptimizerReport, RecoveryReport
from axon_nb.shell import user_frame

# Profilers replace the functions of `signal`, which also take 20 times as long as those that they wrap.
_signal: Any = sys.modules.get("_signal", signal)
_get_handler, _set_handler, _send = _signal.getsignal, _signal.signal, _signal.pthread_kill
_parse_exception_table: Callable[[CodeType], list[Any]] | None = getattr(dis, "_parse_exception_table", None)
OWN_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Interrupts a cell that has replaced the handler of SIGINT; no library uses it."""
_NAMES = {int(number): getattr(number, "name", f"signal {number}") for number in signal.valid_signals()}
_SHOW_ERROR = InteractiveShell.showtraceback.__code__
_MAX_SWALLOWED = 3
"""After this many interrupts without effect, the next is raised where nothing can catch it."""
_MAX_DEFER_S = 5.0
"""Longest time that an interrupt is deferred: the closure of a step may loop forever."""


def force_interrupt(frame: FrameType | None, outermost: FrameType) -> None:
    """Raise KeyboardInterrupt at the next line that no `try` or `with` guards.

    Args:
        frame: The innermost frame.
        outermost: The frame of the cell; its caller receives the exception.
    """
    if _parse_exception_table is None:
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


def clear_forced_interrupt() -> None:
    """Remove the trace function; call it when the cell has finished."""
    sys.settrace(None)


def _is_guarded(frame: FrameType | None, outermost: FrameType) -> bool:
    while frame is not None:
        if any(start <= frame.f_lasti < end for start, end in _guarded_ranges(frame.f_code)):
            return True
        if frame is outermost:
            return False
        frame = frame.f_back
    return True  # not under the cell's frame: a callback, which is left alone


@functools.lru_cache(maxsize=256)
def _guarded_ranges(code: CodeType) -> tuple[tuple[int, int], ...]:
    entries = _parse_exception_table(code) if _parse_exception_table is not None else ()
    return tuple((entry.start, entry.end) for entry in entries)


def _shows_error(frame: FrameType | None, cell_frame: FrameType) -> bool:
    """Whether IPython shows the error of something that the cell has called, such as `%run`: that has ended."""
    while frame is not None and frame is not cell_frame:
        if frame.f_code is _SHOW_ERROR:
            return True
        frame = frame.f_back
    return False


class _OtherHandlers:
    """The Python signal handlers that cells and libraries install: an error raised between cells is printed.

    It would end the loop that the rank runs. After an interrupt, torch's handler of SIGCHLD raises as soon as a worker
    of an abandoned DataLoader exits.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._guarded: dict[int, tuple[Any, Any]] = {}
        """The handler of each signal, and the one that stands in for it between cells."""

    def print_errors(self) -> None:
        for number, handler in zip(_NAMES, map(_get_handler, _NAMES), strict=True):  # once per cell: fast
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), InterruptHandler):
                guarded = functools.partial(self._call, handler)
                self._guarded[number] = handler, guarded
                _set_handler(number, guarded)

    def raise_errors(self) -> None:
        for number, (handler, guarded) in self._guarded.items():
            if _get_handler(number) is guarded:
                _set_handler(number, handler)
        self._guarded.clear()

    def _call(self, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except Exception as error:
            if user_frame(frame) is not None:
                raise
            text = f"The handler of {_NAMES[number]} raised between cells: {error!r}"
            # The handler may have interrupted the stream that it would write to.
            self._kernel.io_loop.asyncio_loop.call_soon_threadsafe(functools.partial(print, text, file=sys.stderr))


class InterruptHandler:
    """The SIGINT handler of a rank, installed for its lifetime.

    Args:
        kernel: The engine's kernel.
        defers: Whether to defer an interrupt that lands on this frame; whoever defers it raises it later.
    """

    def __init__(self, kernel: Any, defers: Callable[[FrameType | None], bool]) -> None:
        self._kernel = kernel
        self._defers = defers
        self._handler = self._on_sigint
        self._others = _OtherHandlers(kernel)
        self._sent = 0
        """Interrupts sent to the cell so far."""
        self.task: Any = None
        """Task of the running async cell; None if there is none."""
        self.raised = 0
        """Interrupts raised in the cell so far."""
        self.running = False
        """Whether a cell runs; outside cells, interrupts are dropped."""
        self.pending = 0
        """Interrupts sent that the main thread has not noticed because it runs C code."""
        self.rejected_runs: deque[str] = deque(maxlen=64)
        """Run ids of cells that were interrupted before they started here."""
        self._run: str | None = None
        self._number = 0
        """Cells that have started here."""
        self._target = 0
        """The cell that an interrupt of this process was sent to; 0: none."""

    def begin_cell(self, run: str | None = None) -> None:
        """Reset the counters for a new cell, of this run id."""
        self._number += 1
        self._run = run
        self.raised = self._sent = 0
        if _get_handler(signal.SIGINT) is not self._handler:  # an earlier cell replaced it
            self.install()
        self._others.raise_errors()
        self.running = True

    def end_cell(self) -> None:
        """Drop interrupts from now on, and print the errors of other signals' handlers."""
        self.running = False
        self._others.print_errors()
        if self.raised > _MAX_SWALLOWED:
            clear_forced_interrupt()

    def install(self) -> None:
        """Install the handler; call it on the main thread."""
        _set_handler(signal.SIGINT, self._handler)
        _set_handler(OWN_SIGNAL, self._handler)

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self.pending = 0
        target, self._target = self._target, 0
        if not self.running or target not in (0, self._number):  # its cell has ended, and another one has begun
            return
        cell_frame = user_frame(frame)
        if cell_frame is not None:
            if self._defers(frame) or (self._sent <= _MAX_SWALLOWED and _shows_error(frame, cell_frame)):
                return
            self.raised += 1
            if self.raised > _MAX_SWALLOWED:
                force_interrupt(frame, cell_frame)
            raise KeyboardInterrupt
        if self.task is not None and not self.task.done():
            self._kernel.io_loop.asyncio_loop.call_soon_threadsafe(self.task.cancel)

    @contextlib.contextmanager
    def track_task(self, task: Any) -> Iterator[None]:
        """Have interrupts cancel this task while it runs."""
        self.task = task
        try:
            yield
        finally:
            self.task = None

    def interrupt(self, run: str | None = None) -> bool:
        """Interrupt the cell of this run id, or any; return whether it was.

        If it does not run, it is rejected when it arrives. Thread-safe.
        """
        number = self._number
        is_running = self.running and (run is None or run == self._run)
        if is_running:
            self._target = number
            self.pending += 1
            self._sent += 1
            current = _get_handler(signal.SIGINT)
            # A handler of the cell's own may stop the cell; if it does not, or there is none, ours is called.
            by_sigint = current is self._handler or (callable(current) and self._sent == 1)
            _send(threading.main_thread().ident or 0, signal.SIGINT if by_sigint else OWN_SIGNAL)
        elif run is not None and run not in self.rejected_runs:  # an abort is sent again and again
            self.rejected_runs.append(run)
        return is_running


class OptimizerSteps:
    """Defers interrupts that land inside a step until it is complete, and counts the steps of each optimizer."""

    def __init__(self) -> None:
        self._deferred_since: float | None = None
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._next = 0
        self._calls = 0
        self._communicated = False
        self.observers: list[Callable[[FrameType | None], None]] = []
        """Called after each step with the frame that made it, which belongs to no other step."""

    def install(self) -> None:
        """Hook into all optimizer steps from now on."""
        register_optimizer_step_pre_hook(self._raise_deferred)
        register_optimizer_step_post_hook(self._after_step)

    def begin_cell(self) -> None:
        """Start counting for a new cell, and drop any deferred interrupt of the last one."""
        self._deferred_since = None
        self._before = weakref.WeakKeyDictionary(self._steps) if self._steps else weakref.WeakKeyDictionary()
        self._calls = recovery.num_calls()

    def end_cell(self) -> None:
        """Note whether the cell communicated; rebuilding groups afterwards does not count."""
        self._communicated = recovery.num_calls() != self._calls

    def defers_interrupt(self, frame: FrameType | None) -> bool:
        """Whether to defer an interrupt that landed on `frame`; it is raised after the optimizer step.

        If the step itself raises, the interrupt is raised before the next step, unless the repeated abort comes first.
        """
        if not step_depth(frame):
            self._deferred_since = None
            return False
        if self._deferred_since is None:
            self._deferred_since = time.monotonic()
        return time.monotonic() - self._deferred_since < _MAX_DEFER_S

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.set(optimizer, self.of(optimizer) + 1)
        current().groups.slowdown.sleep()
        frame = sys._getframe(1)
        if step_depth(frame) < 2:
            for observe in self.observers:
                observe(frame.f_back)
        self._raise_deferred()

    def _raise_deferred(self, *_: Any) -> None:
        # An optimizer that steps another one, such as ZeroRedundancyOptimizer, must finish its step, too.
        if self._deferred_since is not None and step_depth(sys._getframe(1)) < 2:
            self._deferred_since = None
            raise KeyboardInterrupt

    def after_foreign_step(self) -> None:
        """Raise a deferred interrupt after a step that is not one of torch's optimizers."""
        self._raise_deferred()

    def of(self, optimizer: Optimizer) -> int:
        """Number of steps of this optimizer."""
        return self._steps.get(optimizer, 0)

    def set(self, optimizer: Optimizer, steps: int) -> None:
        """Set the number of steps."""
        self._steps[optimizer] = steps
        if steps and optimizer not in self._numbers:
            self._numbers[optimizer], self._next = self._next, self._next + 1

    def save(self, optimizers: Iterable[Optimizer]) -> Any:
        """Return the steps and numbers of optimizers, which the next process of this rank takes over."""
        return [(one, self.of(one), self._numbers.get(one, -1)) for one in optimizers], self._next

    def load(self, saved: Any) -> None:
        """Take over what `save` returned, so that numbers are those of the other ranks."""
        entries, count = saved
        for optimizer, steps, number in entries:
            self._steps[optimizer] = steps
            if number >= 0:
                self._numbers[optimizer] = self._next + number
        self._next += count

    def report(self) -> tuple[OptimizerReport, ...]:
        """Report each live optimizer that has stepped, and named ones that have not stepped yet."""
        names = _optimizers_by_id()
        optimizers = {id(optimizer): optimizer for optimizer in (*self._steps, *(named for named, _ in names.values()))}
        if not optimizers:
            return ()
        in_wrappers = unreplicated_parameters()
        return tuple(
            OptimizerReport(
                number=self._numbers.get(optimizer, -1),
                name=names[key][1] if key in names else "",
                before=self._before.get(optimizer, 0),
                steps=self.of(optimizer),
                shapes=_digest(_parameters(optimizer)),
                not_replicated=unreplicated_reason(_parameters(optimizer), in_wrappers),
                communicated=self._communicated,
            )
            for key, optimizer in optimizers.items()
        )


def recover(epoch: int) -> RecoveryReport:
    """Rebuild the groups after an aborted cell, as `groups.recovery.recover`; adds this rank's steps."""
    return RecoveryReport(recovery.recover(epoch), current().steps.report())


def _optimizers_by_id() -> dict[int, tuple[Optimizer, str]]:
    # type() instead of isinstance: the latter runs user code on lazy proxies.
    values = list(current().kernel.shell.user_ns.items())
    return {id(v): (v, name) for name, v in values if name[:1] != "_" and issubclass(type(v), Optimizer)}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    shapes = ",".join(f"{tuple(tensor.shape)}{tensor.dtype}" for tensor in tensors)
    return hashlib.sha256(shapes.encode()).hexdigest()[:16]
