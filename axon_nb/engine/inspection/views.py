"""Answers the views of a rank: `%memory`, `%shards`, `%timeline` and the cluster's card. Imported when one asks.

For the timeline, records forwards, backwards, steps, slow loading and collections while the notebook watches. All hooks
in torch are installed here and removed when nobody watches any more. Hooks of modules and optimizers are torch's public
ones. The global module hook exists only until the outermost module is reached, whose own hook brings it back. So the
modules inside run without hooks, and what torch has compiled of them stays valid. torch reports no backwards:
`torch.autograd.backward`, which `Tensor.backward` and torch's pipelines look up at each call, is wrapped meanwhile.
Without it (hook `inspection.backward_spans`), the other spans are still recorded.
"""

from __future__ import annotations

import functools
import gc
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
from torch.utils.data import dataloader

from axon_nb.comm.spans import Moment, device_clock
from axon_nb.engine.frames import step_depth
from axon_nb.engine.groups.creation import rebuildable_groups
from axon_nb.engine.groups.flight_recorder import FinishedCalls, dump
from axon_nb.engine.inspection import memory
from axon_nb.engine.inspection.telemetry import with_cost
from axon_nb.engine.inspection.variables import layout_report
from axon_nb.engine.session import RankSession
from axon_nb.errors import UsageError
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.protocol import inspection as protocol
from axon_nb.records.spans import Span, emit, is_suppressed, ring
from axon_nb.records.waits import PUBLIC_NAMES

_SHORTEST_NS = 200_000
"""Of a garbage collection or a wait for a DataLoader that is recorded."""
_POLL_S = 0.5
_RECORDER_S = 0.5
"""Interval between readings of torch's flight recorder, which writes all that it holds each time."""
_COMMUNICATION = frozenset({"collective", "p2p", "wait"})


def backward_problems() -> list[str]:
    """Return what is missing if `Tensor.backward` no longer looks up `torch.autograd.backward`; else nothing."""
    try:
        looks_it_up = "torch.autograd.backward(" in inspect.getsource(torch.Tensor.backward)
    except (OSError, TypeError):  # the source is not available
        looks_it_up = True
    return [] if looks_it_up else ["torch.autograd.backward in Tensor.backward"]


class StepSpans:
    """Records the outermost forward, backward and optimizer step of this rank's main thread."""

    def __init__(self, session: RankSession) -> None:
        self._session, self._rank = session, session.config.rank
        self._main = threading.main_thread().ident
        self._lock = threading.Lock()
        self._until, self._recording = 0.0, False
        self._removers: list[Callable[[], None]] = []
        self._cell: int | None = None
        self._entry_hook: Any = None
        """Handle of the global module hook; None inside an outermost forward."""
        self._exit_hook: Any = None
        """Handle of the outermost module's own hook."""
        self._forward_start = Moment(0)
        self._step_start: Moment | None = None
        self._in_backward, self._collection_start_ns = False, 0

    def watch(self, seconds: float) -> None:
        """Record for the next `seconds`; zero stops. Thread-safe."""
        with self._lock:
            self._until = time.monotonic() + seconds
            self._recording = ring.watched = seconds > 0
            if self._entry_hook is not None and self._exit_hook is not None:
                self._exit_hook.remove()
                self._exit_hook = None
            if self._recording and not self._removers:
                self._install()
                threading.Thread(target=self._remove_hooks_when_idle, name="axon_nb-step-spans", daemon=True).start()

    def _remove_hooks_when_idle(self) -> None:
        """Remove the hooks when the watch has expired."""
        while True:
            time.sleep(_POLL_S)
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
        self._removers = [self._remove_module_hooks, *(handle.remove for handle in steps)]
        if not missing_hooks("inspection.backward_spans"):
            self._removers.append(self._wrap_backward())
        if not missing_hooks("inspection.loader_spans"):
            self._removers.append(self._wrap_loader())
        gc.callbacks.append(self._on_collection)
        self._removers.append(lambda: gc.callbacks.remove(self._on_collection))

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_start_ns = time.monotonic_ns()
        elif self._is_recording():
            self._emit_long("gc", "garbage collection", self._collection_start_ns)

    def _wrap_loader(self) -> Callable[[], None]:
        kind: Any = dataloader._BaseDataLoaderIter
        original = kind.__next__

        @functools.wraps(original)
        def next_batch(batches: Any) -> Any:
            start = time.monotonic_ns()
            try:
                return original(batches)
            finally:
                if self._is_recording():
                    self._emit_long("data", "DataLoader", start)

        def remove() -> None:
            if kind.__next__ is next_batch:
                kind.__next__ = original

        kind.__next__ = next_batch
        return remove

    def _emit_long(self, kind: str, name: str, start_ns: int) -> None:
        if (end_ns := time.monotonic_ns()) - start_ns >= _SHORTEST_NS:
            emit(Span(self._rank, kind, name, start_ns, end_ns))

    def _begin_cell(self) -> None:
        """Reset the state: an interrupt may have left the last cell inside a forward."""
        self._cell, self._in_backward = self._session.cell, False
        self._remove_module_hooks()
        self._entry_hook = register_module_forward_pre_hook(self._before_forward)

    def _remove_module_hooks(self) -> None:
        for handle in (self._entry_hook, self._exit_hook):
            if handle is not None:
                handle.remove()
        self._entry_hook = self._exit_hook = None

    def _wrap_backward(self) -> Callable[[], None]:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward or not self._is_recording():
                return original(*args, **kwargs)
            self._in_backward, start = True, self._moment()
            try:
                return original(*args, **kwargs)
            finally:
                self._in_backward = False
                self._emit("backward", "backward", start)

        def remove() -> None:
            # Code that wrapped it meanwhile keeps our wrapper, which only passes calls on from now.
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        torch.autograd.backward = backward
        return remove

    def _is_recording(self) -> bool:
        if not self._recording or threading.get_ident() != self._main:
            return False
        if self._cell != self._session.cell:
            self._begin_cell()
        return True

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        # A forward inside a backward is a recomputation, not a forward of the model.
        if torch.compiler.is_compiling() or not self._is_recording() or self._in_backward:
            return
        self._remove_module_hooks()
        self._exit_hook = module.register_forward_hook(memory.UncopiedHook(self._after_forward), always_call=True)
        self._forward_start = self._moment()

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._entry_hook is not None or not self._recording:
            return
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._emit("forward", type(inner).__name__, self._forward_start)
        self._entry_hook = register_module_forward_pre_hook(self._before_forward)
        # If the forward raised, torch is iterating over the hooks; ours is removed before the next forward.
        if sys.exc_info()[0] is None and self._exit_hook is not None:
            self._exit_hook.remove()
            self._exit_hook = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_recording() and step_depth(sys._getframe(1)) == 1:
            self._step_start = self._moment()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # An optimizer that steps another one, such as ZeroRedundancyOptimizer, counts as one step.
        if self._step_start and self._is_recording() and step_depth(sys._getframe(1)) == 1:
            self._emit("optimizer", type(optimizer).__name__, self._step_start)
            self._step_start = None

    def _moment(self) -> Moment:
        return device_clock.moment(self._session.device)

    def _emit(self, kind: str, name: str, since: Moment) -> None:
        self._session.groups.slowdown.sleep()
        if not is_suppressed(kind):  # a pipeline stage records it with its microbatch
            device_clock.emit(Span(self._rank, kind, name, since.ns, time.monotonic_ns()), since)


class SpanReader:
    """Reads this rank's ring for one notebook."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._steps = StepSpans(session)
        self._finished = FinishedCalls(session.config.rank, device_clock)
        self._due = 0.0
        self._members: dict[str, list[int]] = {}

    def read(self, *, since: int, watch_s: float) -> protocol.SpansReply:
        """Read recorded spans.

        Args:
            since: Number of the first span wanted, from the last answer; 0: the oldest available.
            watch_s: How many more seconds forwards, backwards and steps are recorded; 0: unchanged.
        """
        if watch_s > 0:
            self._steps.watch(watch_s)
        device_clock.collect()
        self._read_native(watch_s)
        start = since if since <= ring.position else 0
        spans, position, lost = ring.since(start)
        rows = [_span_row(span) for span in spans]
        groups = {row[5] for row in rows if row[5]}
        return protocol.SpansReply(
            spans=rows,
            next=position,
            lost=lost if start else 0,
            groups={name: tuple(members) for name in groups if (members := self._ranks_of(name))},
            now_ns=time.monotonic_ns(),
            process=os.getpid(),
        )

    def _read_native(self, watch_s: float) -> None:
        """Record what torch's own groups have finished; while a view polls, not each time."""
        native, is_due = self._session.groups.native, time.monotonic() >= self._due
        if native is None or not (is_due or watch_s == 0):
            return
        self._due = time.monotonic() + _RECORDER_S
        if watch_s > 0:
            self._finished.enable_timing(native)
        for span in self._finished.read(dump(), {str(group.group_name) for group in native.all()}):
            emit(span)

    def _ranks_of(self, name: str) -> list[int]:
        if name not in self._members:
            groups = rebuildable_groups()
            self._members = {str(group.group_name): dist.get_process_group_ranks(group) for group in groups}
        return self._members.get(name, [])


def _span_row(span: Span) -> list[Any]:
    """A span as a list, with the name that users know."""
    row = list(span)
    if span.kind in _COMMUNICATION:
        row[2] = PUBLIC_NAMES.get(span.name, span.name)
    return row


class Views:
    """What views ask of a rank, and what it remembers between two requests."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self.gradients = memory.GradientReader(session)
        self._calls = memory.CallRecorder(session)
        self._imports = memory.BackgroundImports()
        self._memory = memory.MemoryReader(session, self.gradients, self._calls, self._imports)
        self._spans = SpanReader(session)
        self._planner: Any = None
        """The memory planner, once its module is imported."""
        self._handlers: dict[type[Any], Callable[[Any], Any]] = {
            protocol.LayoutsRequest: with_cost(self._report_layouts),
            protocol.MemoryRequest: with_cost(lambda request: self._memory.report(request.names)),
            protocol.PlanRequest: self._report_plan,
            protocol.SpansRequest: lambda request: self._spans.read(since=request.since, watch_s=request.watch),
        }

    def answer(self, request: Any) -> Any:
        """Answer a request of `VIEW_REQUESTS`."""
        return self._handlers[type(request)](request)

    def _report_layouts(self, request: protocol.LayoutsRequest) -> protocol.LayoutsReply:
        gradients = self.gradients if request.gradients else None
        space = self._session.kernel.shell.user_ns
        return layout_report(request.names, space, gradients=gradients, known=request.known)

    def _report_plan(self, request: protocol.PlanRequest) -> protocol.PlanReply:
        """Answer for the memory planner; `is_pending` while that is imported, or `refused`."""
        session, names = self._session, list(request.names)
        try:
            modules, optimizers = memory.modules_and_optimizers(names, session)
            if len(modules) != 1:
                where = ", ".join(names) or "the namespace"
                why = f"A plan needs one model, but {where} holds {len(modules)}. Name one: `%memory model`."
                return protocol.PlanReply(refused=why)
            if self._planner is None:
                if (module := self._imports.get("axon_nb.engine.inspection.memory_plan")) is None:
                    return protocol.PlanReply(is_pending=True)
                self._planner = module.Planner(session, self._calls)
            reply: protocol.PlanReply = self._planner.inputs(
                modules[0], optimizers, what_if=request.what_if, known_key=request.known, stages_only=request.stages
            )
        except (UsageError, ImportError) as error:
            return protocol.PlanReply(refused=str(error))
        return reply
