"""Records one rank's run of a program: each operation, collective and storage, with the user's line."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from axon_nb.plan.footprint.fake_world import SAME
from axon_nb.plan.footprint.storage_log import StorageLog
from axon_nb.plan.hardware.rates import Rates
from axon_nb.plan.program.record import MAIN_STREAM, Call, Event, Place, RankRecord
from axon_nb.plan.tracing.op_counter import does_work, work_of
from axon_nb.plan.traffic.recorded import OPERATIONS
from axon_nb.records.stacks import library_of

__all__ = ["ProgramLog"]

_TORCH = Path(torch.__file__).parent
_OPTIM = str(_TORCH / "optim")
_ENGINE = str(_TORCH / "autograd" / "graph.py"), "_engine_run_backward"
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
_kinds: dict[int, tuple[str, CodeType]] = {}
"""By the identity of a code object, which is kept so that no other has the same."""


class ProgramLog(StorageLog):
    """Records what a program does on this rank.

    Args:
        rates: How fast operations run; None: operations take no time.
        copying: The same as in `StorageLog`.
        item: What tensors answer when their value is read; None: reading raises.
    """

    def __init__(self, rates: Rates | None, copying: Any, item: float | None) -> None:
        super().__init__(copying)
        self._rates, self._item = rates, item
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

    # ---- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        self._drop_works()
        name = func._schema.name
        if name == _READ and self._item is not None:
            self.synchronize()
            return self._item if args[0].dtype.is_floating_point else int(self._item)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self._record(func, name, args, kwargs or {}, result)
        return result

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
                seconds = rates.busy_s(work) * factor + rates.launches.get(phase, rates.launch_s * factor)
            self.events.append(("op", self.stream, seconds, place))

    def _record_call(self, name: str, args: Any, result: Any) -> None:
        handles = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.ScriptObject)]
        if not handles:
            return
        group = next(found for handle in handles if (found := _group_of(handle)) is not None)
        ranks = tuple(dist.get_process_group_ranks(group))
        operation, is_shard = OPERATIONS.get(name, (_OTHERS.get(name, ""), False))
        if not operation:
            return
        tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
        size = 0 if name == "barrier" else sum(tensor.nbytes for tensor in tensors)
        if name in ("gather", "scatter"):
            size = max(size, sum(leaf.nbytes for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)))
        peer = ranks[args[2]] if operation in ("send", "recv") and isinstance(args[2], int) else -1
        work: Any = dist.Work.unbox(handles[-1])
        work.seq_id = self._call(operation, ranks, size * (len(ranks) if is_shard else 1), peer)
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

    # ---- places

    def _place(self) -> int:
        file, line, phase = "", 0, ""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not (file and phase):
            kind = _kind_of(frame.f_code)
            if kind == "user" and not file:
                file, line = frame.f_code.co_filename, frame.f_lineno
            elif kind == "end":
                break
            elif kind and kind != "user" and not phase:
                phase = kind
            frame = frame.f_back
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

    # ---- the result

    def finish(self, rank: int, limit: float | None) -> RankRecord:
        """Return the record.

        Args:
            rank: The rank in the world.
            limit: Bytes of memory; None: unlimited.
        """
        places = tuple(self._places)
        total = peak = at = 0
        over = None
        for number, change in enumerate(self.changes):
            total += change.size
            if total > peak:
                peak, at = total, number
            if over is None and limit is not None and total > limit:
                over = self._made_at.get(change.block, 0)
        held: Counter[int] = Counter()
        for change in self.changes[: at + 1]:
            held[change.block] += change.size
        by_place: Counter[int] = Counter()
        for block, size in held.items():
            if size:
                by_place[self._made_at.get(block, 0)] += size
        last = self._made_at.get(self.changes[at].block, 0) if self.changes else 0
        shapes = tuple((call.name, call.group, call.bytes, call.place) for call in self._calls)
        sizes = tuple(map(len, self._groups))
        signature = hash((places, tuple(self.events), shapes, sizes, peak, tuple(by_place.items())))
        return RankRecord(
            rank, places, tuple(self.events), tuple(self._calls), tuple(self._groups), self._flops, peak, last,
            dict(by_place), over, sum(one[0] == "step" and not one[3] for one in self.events), signature,
        )  # fmt: skip


def _group_of(handle: torch.ScriptObject) -> Any:
    try:
        return dist.ProcessGroup.unbox(handle)
    except RuntimeError:
        return None  # a reduction, or a handle to wait for


def _kind_of(code: CodeType) -> str:
    """``user``, a phase that a function of torch begins, ``end`` of the stack, or empty."""
    found = _kinds.get(id(code))
    if found is None:
        name = code.co_filename
        kind = ""
        if name.startswith(_OPTIM):
            kind = "optimizer"
        elif (name, code.co_name) == _ENGINE:
            kind = "backward"
        elif code.co_name == "run_rank" and name.endswith("rank.py"):
            kind = "end"
        elif not library_of(name):
            kind = "user"
        found = _kinds[id(code)] = kind, code
    return found[0]
