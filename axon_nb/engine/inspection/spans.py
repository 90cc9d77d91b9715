"""What the notebook is told when it asks for spans; asking while somebody looks also keeps the finer ones recorded.

Forwards, backwards and optimizer steps as spans, recorded only while somebody watches.

All that is hung into torch for it is here, and is taken out again when nobody watches any more. Hooks of modules and
optimizers are torch's public ones. That for all modules is there only until the outermost one is reached, whose own
hook brings it back: the modules within it run without hooks, and what torch has compiled of them stays as it is. Of
backwards torch tells nobody: `torch.autograd.backward`, which `Tensor.backward` and torch's pipelines look up at each
call, is wrapped for that time. `missing_span_hooks()` says when a torch has it no more; the others are recorded all the
same then.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from axon_nb.engine.collective_names import PUBLIC_NAMES
from axon_nb.engine.groups.abort import step_depth
from axon_nb.engine.groups.install import all_groups
from axon_nb.engine.session import RankSession, current
from axon_nb.records.protocol.inspection import SpansReply
from axon_nb.records.spans import Span, emit, is_suppressed, ring

__all__ = ["SpanReader", "StepSpans", "missing_span_hooks", "span_reader"]

_LOOK_S = 0.5


def missing_span_hooks() -> list[str]:
    """Names of the hooks that this torch does not have."""
    if not callable(getattr(torch.autograd, "backward", None)):
        return ["torch.autograd.backward"]
    try:
        looks_it_up = "torch.autograd.backward(" in inspect.getsource(torch.Tensor.backward)
    except (OSError, TypeError):  # no source is there to look at
        looks_it_up = True
    return [] if looks_it_up else ["torch.autograd.backward in Tensor.backward"]


class _Exit:
    """A hook that is not copied along with its module, should that be while it is there."""

    def __init__(self, call: Callable[[torch.nn.Module], None]) -> None:
        self._call = call

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._call(module)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _no_exit, ()


def _no_exit() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    pass


class StepSpans:
    """Records the outermost forward, backward and step of this rank's main thread.

    Args:
        session: The rank.
    """

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._rank = session.config.rank
        self._main = threading.main_thread().ident
        self._lock = threading.Lock()
        self._until = 0.0
        self._recording = False
        self._removers: list[Callable[[], None]] = []
        self._cell: int | None = None
        self._entry: Any = None
        """The handle of the hook for all modules; None within an outermost one."""
        self._exit: Any = None
        """The handle of that one's own hook."""
        self._began = self._step_began = 0
        self._in_backward = False

    def watch(self, seconds: float) -> None:
        """Record for the next `seconds`; zero ends it. From any thread."""
        with self._lock:
            self._until = time.monotonic() + seconds
            self._recording = ring.watched = seconds > 0
            if self._entry is not None and self._exit is not None:
                self._exit.remove()
                self._exit = None
            if self._recording and not self._removers:
                self._install()
                threading.Thread(target=self._look_after, name="axon_nb-step-spans", daemon=True).start()

    def _look_after(self) -> None:
        """Take the hooks out once nobody has asked for them again."""
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                if time.monotonic() < self._until:
                    continue
                self._recording = ring.watched = False
                for remove in self._removers:
                    remove()
                self._removers.clear()
                return

    def _install(self) -> None:
        self._begin_cell()
        steps = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._removers = [self._leave_modules, *(handle.remove for handle in steps)]
        if not missing_span_hooks():
            self._removers.append(self._wrap_backward())

    def _begin_cell(self) -> None:
        """Nothing is under way: an interrupt may have left the last cell in the middle of a forward."""
        self._cell, self._in_backward = self._session.cell, False
        self._leave_modules()
        self._entry = register_module_forward_pre_hook(self._before_forward)

    def _leave_modules(self) -> None:
        for handle in (self._entry, self._exit):
            if handle is not None:
                handle.remove()
        self._entry = self._exit = None

    def _wrap_backward(self) -> Callable[[], None]:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward or not self._records():
                return original(*args, **kwargs)
            self._in_backward, start = True, time.monotonic_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._in_backward = False
                self._emit("backward", "backward", start)

        def remove() -> None:
            # Who has wrapped it meanwhile keeps ours, which only passes on from now.
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        torch.autograd.backward = backward
        return remove

    def _records(self) -> bool:
        if not self._recording or threading.get_ident() != self._main:
            return False
        if self._cell != self._session.cell:
            self._begin_cell()
        return True

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        # What runs within a backward is computed again for it, and no forward of the model.
        if torch.compiler.is_compiling() or not self._records() or self._in_backward:
            return
        self._leave_modules()
        self._exit = module.register_forward_hook(_Exit(self._after_forward), always_call=True)
        self._began = time.monotonic_ns()

    def _after_forward(self, module: torch.nn.Module) -> None:
        if self._entry is not None or not self._recording:
            return
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._emit("forward", type(inner).__name__, self._began)
        self._entry = register_module_forward_pre_hook(self._before_forward)
        # When the forward has raised, torch is walking over the hooks: ours goes before the next forward.
        if sys.exc_info()[0] is None and self._exit is not None:
            self._exit.remove()
            self._exit = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._records() and step_depth(sys._getframe(1)) == 1:
            self._step_began = time.monotonic_ns()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # An optimizer that steps another one, such as ZeroRedundancyOptimizer, is one step.
        if self._step_began and self._records() and step_depth(sys._getframe(1)) == 1:
            self._emit("optimizer", type(optimizer).__name__, self._step_began)
            self._step_began = 0

    def _emit(self, kind: str, name: str, start_ns: int) -> None:
        if not is_suppressed(kind):  # a stage of a pipeline tells it, with its microbatch
            emit(Span(self._rank, kind, name, start_ns, time.monotonic_ns()))


_COMMUNICATION = frozenset({"collective", "p2p", "wait"})


class SpanReader:
    """Reads this rank's ring for one notebook.

    Args:
        session: The rank.
    """

    def __init__(self, session: RankSession) -> None:
        self._steps = StepSpans(session)
        self._members: dict[str, list[int]] = {}

    def read(self, *, since: int, watch_s: float) -> SpansReply:
        """What has been recorded.

        Args:
            since: Number of the first span that is wanted, as the last answer said; 0: as old as are kept.
            watch_s: For how many seconds forwards, backwards and steps are recorded besides, from now; 0: as before.
        """
        if watch_s > 0:
            self._steps.watch(watch_s)
        asked = since if since <= ring.position else 0
        spans, position, lost = ring.since(asked)
        rows = [_named(span) for span in spans]
        groups = {row[5] for row in rows if row[5]}
        return SpansReply(
            spans=rows,
            next=position,
            lost=lost if asked else 0,
            groups={name: tuple(members) for name in groups if (members := self._ranks_of(name))},
            now_ns=time.monotonic_ns(),
            process=os.getpid(),
        )

    def _ranks_of(self, name: str) -> list[int]:
        if name not in self._members:
            self._members = {str(group.group_name): dist.get_process_group_ranks(group) for group in list(all_groups())}
        return self._members.get(name, [])


def _named(span: Span) -> list[Any]:
    """By the name that users know."""
    row = list(span)
    if span.kind in _COMMUNICATION:
        row[2] = PUBLIC_NAMES.get(span.name, span.name)
    return row


@functools.cache
def span_reader() -> SpanReader:
    """The one of this rank."""
    return SpanReader(current())
