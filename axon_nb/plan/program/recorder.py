"""Records one rank's run of a program: each operation, collective and storage, with the user's line.

CUDA's streams and events, without a device, only note who waits for whom.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from msgspec import Struct
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from axon_nb.errors import UsageError
from axon_nb.plan.footprint.fake_world import SAME, WHOLE_GRADIENTS, StorageLog
from axon_nb.plan.hardware import Rates
from axon_nb.plan.program.record import MAIN_STREAM, Call, Event, Peak, PipelineStep, Place, RankRecord
from axon_nb.plan.tracing.fake_tensors import replaced
from axon_nb.plan.tracing.operations import CallStack, does_work, phase_or_user, product_dtype, work_of
from axon_nb.plan.traffic.plan import OPERATIONS

_READ = "aten::_local_scalar_dense"
_FUNCTIONAL = "_c10d_functional::"
_OTHERS = {"reduce": "all_reduce", "gather": "all_gather", "scatter": "broadcast", "recv_any_source": "recv"}
"""Collectives to or from one rank, by the one whose volume they have at most."""
_FUNCTIONAL_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
_resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
_OUR_REFERENCES = 3
"""To a handle that only we hold: an entry, a loop's variable, an argument."""


class ProgramLog(StorageLog):
    """Records what a program does on this rank.

    Args:
        rates: How fast operations run; None: operations take no time.
        copying: The same as in `StorageLog`.
        item: What tensors answer when their value is read; None: reading raises.
        rank: Of the world.
        pipeline_steps: Those of rank 0, for other ranks.
    """

    def __init__(
        self,
        rates: Rates | None,
        copying: Any,
        item: float | None,
        *,
        rank: int,
        pipeline_steps: Sequence[PipelineStep],
    ) -> None:
        super().__init__(copying)
        self._rates, self._item = rates, item
        self.rank, self._known_steps = rank, pipeline_steps
        self._pipeline_steps: list[PipelineStep] = []
        self._is_paused = False
        self.events: list[Event] = []
        self._calls: list[Call] = []
        self._groups: dict[tuple[int, ...], int] = {}
        self._places: dict[Place, int] = {}
        self._phases: list[str] = []
        self._made_at: dict[int, int] = {}
        self._works: list[tuple[Any, Any]] = []
        """Handles of calls, and the tensors that real ones hold. A handle's `seq_id` is the number of its call."""
        self._results: dict[int, int] = {}
        """Call by the storage of its result, for collectives that return a tensor to wait for."""
        self._deferred: list[int] = []
        self._optimizers: dict[int, int] = {}
        self._callers = CallStack(phase_or_user)
        self._by_dtype: dict[str, Rates] = {}
        """The rates of matrix products."""
        self._flops = 0.0
        self.stream, self._num_streams, self._num_marks = MAIN_STREAM, 1, 0

    # ---- streams and waits

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        self._num_streams += 1
        return self._num_streams - 1

    def mark_stream(self, stream: int) -> int:
        """Record an event on a stream, and return its number."""
        self._num_marks += 1
        self.events.append(("record", stream, 0.0, self._num_marks))
        return self._num_marks

    def wait_mark(self, stream: int, mark: int) -> None:
        """Have a stream wait for an event."""
        self.events.append(("wait_event", stream, 0.0, mark))

    def synchronize(self) -> None:
        """Have the host wait for the current stream."""
        self.events.append(("sync", self.stream, 0.0, 0))

    def wait(self, work: Any) -> None:
        """Have the current stream wait for a collective, by its handle."""
        if work.seq_id >= 0:
            self.events.append(("wait", self.stream, 0.0, work.seq_id))

    def wait_after_backward(self, work: Any) -> None:
        """Have the main stream wait for a collective as soon as the running backward ends."""
        self._deferred.append(work.seq_id)

    def end_step(self, optimizer: Any) -> None:
        """Record the end of an optimizer's step."""
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        self.events.append(("step", MAIN_STREAM, 0.0, number))

    # ---- pipelines

    @property
    def pipeline_step(self) -> PipelineStep:
        """What rank 0 said before the step that comes now.

        Raises:
            UsageError: it said nothing.
        """
        number = len(self._pipeline_steps)
        if number >= len(self._known_steps):
            raise UsageError("a plan knows the tensors between stages of a Pipeline only if rank 0 has its first stage")
        return self._known_steps[number]

    def end_agreement(self, step: PipelineStep) -> None:
        """Record what this rank says before a step of a pipeline."""
        self._pipeline_steps.append(step)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Inside, nothing is recorded."""
        return replaced(self, "_is_paused", True)

    # ---- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        self._drop_works()
        name = func._schema.name
        if name == _READ and self._item is not None:
            self.synchronize()
            return self._item if args[0].dtype.is_floating_point else int(self._item)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self._record(func, name, args, kwargs or {}, result)
            if name in WHOLE_GRADIENTS:  # once per unit and step
                self.wrap("full_shard", len(args[0]))
        elif any(issubclass(kind, DTensor) for kind in types):
            self.wrap("dtensor", 1)
        return result

    def wrap(self, wrapper: str, count: int) -> None:
        """Record the host's time in a wrapper.

        Args:
            wrapper: As in `Rates.wrappers`.
            count: Parameters, or operations on DTensors.
        """
        if self._rates is not None and (each := self._rates.wrappers.get(wrapper)):
            self.events.append(("op", self.stream, count * each, self._place()))

    def _drop_works(self) -> None:
        """Let go of what handles hold that the program has dropped."""
        if self._works:
            self._works = [(work, held) for work, held in self._works if sys.getrefcount(work) > _OUR_REFERENCES]

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if name in SAME:
            call = self._results.pop(args[0].untyped_storage()._cdata, None)
            if call is not None:
                self.events.append(("wait", self.stream, 0.0, call))
        elif name.startswith("c10d::"):
            self._record_call(name.removeprefix("c10d::").rstrip("_"), args, result)
        elif name.startswith(_FUNCTIONAL):
            self._record_functional(name.removeprefix(_FUNCTIONAL), args, result)
        elif does_work(func):
            work = work_of(func._overloadpacket, args, kwargs, result)
            self._flops += work.flops
            place = self._place()
            phase = self._phases[place]
            if self._deferred and phase != "backward":
                self.events += [("wait", MAIN_STREAM, 0.0, call) for call in self._deferred]
                self._deferred.clear()
            seconds = 0.0
            if self._rates is not None:
                rates, factor = self._rates, self._rates.factors.get(phase, 1.0)
                if work.flops:
                    dtype = product_dtype(func._overloadpacket, args)
                    rates = self._by_dtype.get(dtype) or self._by_dtype.setdefault(dtype, rates.for_products(dtype))
                seconds = rates.busy_s(work) * factor + rates.launches.get(phase, rates.launch_s * factor)
            self.events.append(("op", self.stream, seconds, place))

    def _record_call(self, name: str, args: Any, result: Any) -> None:
        handles = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.ScriptObject)]
        if not handles:
            return
        group = next(found for handle in handles if (found := _group_of(handle)) is not None)
        ranks = tuple(dist.get_process_group_ranks(group))
        operation = OPERATIONS.get(name) or _OTHERS.get(name, "")
        if not operation:
            return
        tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
        size = 0 if name == "barrier" else sum(tensor.nbytes for tensor in tensors)
        if operation in ("gather", "reduce_scatter", "scatter"):
            size = max(size, sum(leaf.nbytes for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)))
        peer = ranks[args[2]] if operation in ("send", "recv") and isinstance(args[2], int) else -1
        work: Any = dist.Work.unbox(handles[-1])
        work.seq_id = self._call(operation, ranks, size, peer)
        self._works.append((work, tensors))

    def _record_functional(self, name: str, args: Any, result: Any) -> None:
        operation = _FUNCTIONAL_NAMES.get(name.removesuffix("_").removesuffix("_coalesced"))
        group = next((arg for arg in reversed(args) if isinstance(arg, str)), None)
        if operation is None or group is None:
            return
        ranks = tuple(dist.get_process_group_ranks(_resolve(group)))
        whole = result if operation == "all_gather" else args[0]
        tensors = [leaf for leaf in tree_leaves(whole) if isinstance(leaf, torch.Tensor)]
        call = self._call(operation, ranks, sum(tensor.nbytes for tensor in tensors))
        for leaf in tree_leaves(result):
            self._results[leaf.untyped_storage()._cdata] = call

    def _call(self, operation: str, ranks: tuple[int, ...], size: int, peer: int = -1) -> int:
        group = self._groups.setdefault(ranks, len(self._groups))
        self._calls.append(Call(operation, group, size, self._place(), peer))
        self.events.append(("call", self.stream, 0.0, len(self._calls) - 1))
        return len(self._calls) - 1

    def _place(self) -> int:
        file, line, phase = "", 0, ""
        for kind, frame in self._callers.frames():
            if kind == "end" or (file and phase):
                break
            if kind != "user":
                phase = phase or kind
            elif not file:
                file, line = frame.f_code.co_filename, frame.f_lineno
        place = Place(file, line, phase or "forward")
        number = self._places.setdefault(place, len(self._places))
        if number == len(self._phases):
            self._phases.append(place.phase)
        return number

    def _is_held(self, tensor: FakeTensor) -> bool:
        return tensor.device.type != "meta"

    def _add(self, storage: torch.UntypedStorage, size: int, role: str) -> None:
        self._made_at[self._next] = self._place()
        super()._add(storage, size, role)

    def _log_transient(self, tensors: Any) -> None:
        place, first = self._place(), self._next
        super()._log_transient(tensors)
        self._made_at.update(dict.fromkeys(range(first, self._next), place))

    def finish(self, limit: float | None) -> RankRecord:
        """Return the record.

        Args:
            limit: Bytes of memory; None: unlimited.
        """
        places = tuple(self._places)
        peak = Peak.of(self.changes, self._made_at, limit)
        shapes = tuple((call.name, call.group, call.bytes, call.place) for call in self._calls)
        sizes = tuple(map(len, self._groups))
        signature = hash((places, tuple(self.events), shapes, sizes, peak.bytes, tuple(peak.by_place.items())))
        return RankRecord(
            self.rank, places, tuple(self.events), tuple(self._calls), tuple(self._groups), self._flops, peak,
            sum(one[0] == "step" and not one[3] for one in self.events), signature, tuple(self._by_dtype),
            tuple(self._pipeline_steps),
        )  # fmt: skip


def _group_of(handle: torch.ScriptObject) -> Any:
    try:
        return dist.ProcessGroup.unbox(handle)
    except RuntimeError:
        return None  # a reduction, or a handle to wait for


class Recording(Struct):
    """The log of the rank that runs; patches outlive one rank, because programs bind names when they are imported."""

    log: ProgramLog | None = None
    pipeline_steps: tuple[PipelineStep, ...] = ()
    """Those of rank 0, once it has run."""

    @property
    def current(self) -> ProgramLog:
        """The running rank's log."""
        assert self.log is not None
        return self.log


class Stream:
    """As `torch.cuda.Stream`."""

    recording: ClassVar[Recording]
    current: ClassVar[Stream]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = self.recording.current.new_stream()

    def wait_stream(self, stream: Stream) -> None:
        """Wait for what another stream has to do so far."""
        log = self.recording.current
        log.wait_mark(self.number, log.mark_stream(stream.number))

    def record_event(self, event: StreamEvent | None = None) -> StreamEvent:
        """Record an event, a new one by default."""
        event = StreamEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: StreamEvent) -> None:
        """Wait for an event."""
        event.wait(self)

    def synchronize(self) -> None:
        """Have the host wait."""
        self.recording.current.synchronize()


class StreamEvent:
    """As `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        """Record what a stream has to do so far."""
        self._number = Stream.recording.current.mark_stream((stream or Stream.current).number)

    def wait(self, stream: Stream | None = None) -> None:
        """Have a stream wait."""
        if self._number:
            Stream.recording.current.wait_mark((stream or Stream.current).number, self._number)

    def synchronize(self) -> None:
        """Have the host wait."""
        Stream.recording.current.synchronize()

    def query(self) -> bool:
        """Whether it was reached."""
        return True

    def elapsed_time(self, _: StreamEvent) -> float:
        """Milliseconds to another event: unknown while the program runs."""
        return 0.0


@contextlib.contextmanager
def _use(stream: Stream | None) -> Iterator[None]:
    before = Stream.current
    Stream.current = stream or before
    Stream.recording.current.stream = Stream.current.number
    try:
        yield
    finally:
        Stream.current = before
        if Stream.recording.log is not None:
            Stream.recording.log.stream = before.number


def stream_names(recording: Recording) -> dict[str, Any]:
    """Return what replaces the names of `torch.cuda` that have to do with streams.

    Args:
        recording: Where waits are recorded.
    """
    main = object.__new__(Stream)
    main.number = MAIN_STREAM
    Stream.recording, Stream.current = recording, main
    return {
        "Stream": Stream,
        "Event": StreamEvent,
        "stream": _use,
        "current_stream": lambda *_: Stream.current,
        "default_stream": lambda *_: main,
    }
