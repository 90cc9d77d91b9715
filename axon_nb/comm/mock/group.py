"""A process group of a mock world: torch's group API, executed in this process once the last rank has called.

A hub connects the ranks of a group and combines their tensors, always in rank order. Collectives match by call number,
messages by sender, receiver and tag. In worlds of `MockBackend.create_world`, the caller's thread drives all ranks.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct, field
from torch._C._distributed_c10d import Work

from axon_nb.comm import errors
from axon_nb.comm.calls import report_call
from axon_nb.comm.mock.scheduler import TurnScheduler
from axon_nb.comm.torch_group import PythonProcessGroup, register_group
from axon_nb.records.ranks import name_ranks

NAME = "axon_mock"
"""The backend's name in torch."""
Tensors = Sequence[torch.Tensor]
_SUM: Any = dist.ReduceOp.SUM
_OPS: Any = dist.ReduceOp.RedOpType
_PAIRWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    _OPS.SUM: torch.add,
    _OPS.AVG: torch.add,
    _OPS.PRODUCT: torch.mul,
    _OPS.MIN: torch.minimum,
    _OPS.MAX: torch.maximum,
    _OPS.BAND: torch.bitwise_and,
    _OPS.BOR: torch.bitwise_or,
    _OPS.BXOR: torch.bitwise_xor,
}


class MockBackend:
    """One rank of a simulated world; pass it to `ProcessGroup.from_backend`."""

    kind = "mock"

    def __init__(self, hub: Hub, rank: int) -> None:
        self.group = MockGroup(hub, rank, None, f"axon_mock_{uuid.uuid4().hex}")
        register_group(self.group, "cpu")

    @classmethod
    def create_world(cls, world_size: int) -> list[MockBackend]:
        """Return the backends of a world of `world_size` ranks.

        Raises:
            InvalidRankError: `world_size` is below 1.
        """
        if world_size < 1:
            raise errors.InvalidRankError(f"world_size must be at least 1; got {world_size}.")
        hub = Hub(tuple(range(world_size)))
        return [cls(hub, rank) for rank in range(world_size)]

    def rank(self) -> int:
        """Return this backend's rank."""
        return self.group.rank()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.group.size()


class MockGroup(PythonProcessGroup):
    """One rank's handle on a group.

    Args:
        hub: Shared by all ranks of the group.
        rank: This rank within the group.
        scheduler: Decides which rank runs; None: one thread drives all ranks, so no call can block.
        name: torch's name of the group.
        synchronous_sends: Whether a send completes only when its receiver asks for it.
    """

    def __init__(
        self, hub: Hub, rank: int, scheduler: TurnScheduler | None, name: str = "", *, synchronous_sends: bool = False
    ) -> None:
        super().__init__(rank, len(hub.ranks), name, backend=NAME)
        self._hub = hub
        self._scheduler = scheduler
        self._synchronous_sends = synchronous_sends

    def _get_backend(self, device: torch.device) -> MockGroup:
        """Return this group, as torch asks it for the backend's capabilities."""
        return self

    def _join(self, name: str, args: Any, execute: Callable[[list[Any]], None], output: Any) -> MockWork:
        self._report(name.partition(" ")[0], args if isinstance(args, tuple) else (args,))
        pending = self._hub.join(self._own_rank, name, args, execute)

        def waiting_in() -> str:
            return f"{name} for {name_ranks(self._hub.absent_ranks(pending))}"

        return MockWork(self, lambda: pending.done, waiting_in, output)

    def _report(self, name: str, args: tuple[Any, ...], peer: int = -1) -> None:
        report_call(name, args, self._own_rank, lambda: self._hub.ranks, peer)

    def wait_until(self, ready: Callable[[], bool], waiting_in: Callable[[], str]) -> None:
        """Let the other ranks run until `ready()`; `waiting_in` names the call, should none be able to."""
        if ready():
            return
        if self._scheduler is None or self._scheduler.rank is None:
            raise errors.DeadlockError(
                f"Deadlock: this thread waits in {waiting_in()}, and nothing else is running. Make the call with "
                "async_op=True on every rank's group before waiting for one, or run a function on all ranks with "
                "`World.mock(n).run(fn)`."
            )
        self._scheduler.wait_for(ready, waiting_in)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MockWork:
        """Reduce over ranks, in place."""
        op = opts.reduceOp if opts is not None else _SUM

        def execute(args_by_rank: list[Tensors]) -> None:
            for parts in zip(*args_by_rank, strict=True):
                self._check_shapes("all_reduce", parts)
                total = combine(parts, op)
                with torch.no_grad():  # detach() would leave a sparse tensor unchanged
                    for part in parts:
                        part.copy_(total)

        return self._join("all_reduce", list(tensors), execute, list(tensors))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> MockWork:
        """Reduce over ranks, on one rank."""
        root, op = opts.rootRank, opts.reduceOp

        def execute(args_by_rank: list[Tensors]) -> None:
            parts = [args[0] for args in args_by_rank]
            self._check_shapes("reduce", parts)
            parts[root].detach().copy_(combine(parts, op))

        return self._join(f"reduce to rank {root}", list(tensors), execute, list(tensors))

    def broadcast(self, tensors: Tensors, opts: Any) -> MockWork:
        """Copy one rank's tensors to all ranks."""
        root = opts.rootRank

        def execute(args_by_rank: list[Tensors]) -> None:
            for parts in zip(*args_by_rank, strict=True):
                self._check_shapes("broadcast", parts)
                for part in parts:
                    if part is not parts[root]:
                        part.detach().copy_(parts[root].detach())

        return self._join(f"broadcast from rank {root}", list(tensors), execute, list(tensors))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> MockWork:
        """Gather all ranks' tensors on every rank."""

        def execute(args_by_rank: list[tuple[Sequence[Tensors], Tensors]]) -> None:
            for position in range(len(args_by_rank[0][1])):
                for rank_outputs, _ in args_by_rank:
                    for source, target in enumerate(rank_outputs[position]):
                        self._copy_into("all_gather", target, args_by_rank[source][1][position])

        return self._join("all_gather", (outputs, inputs), execute, list(outputs[0]) if outputs else [])

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> MockWork:
        """Like `allgather`, with outputs indexed by rank first."""
        by_tensor = [[rank_outputs[position] for rank_outputs in outputs] for position in range(len(inputs))]
        return self.allgather(by_tensor, inputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MockWork:
        """Gather all ranks' tensors into one tensor on every rank."""
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MockWork:
        """Like `all_gather_single`, for several tensors at once."""

        def execute(args_by_rank: list[tuple[Tensors, Tensors]]) -> None:
            for position in range(len(args_by_rank[0][1])):
                parts = [inputs[position].detach().reshape(-1) for _, inputs in args_by_rank]
                self._check_shapes("all_gather", parts)
                joined = torch.cat(parts)
                for targets, _ in args_by_rank:
                    self._copy_into("all_gather", targets[position].view(-1), joined)

        return self._join("all_gather", (outputs, inputs), execute, list(outputs))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> MockWork:
        """Gather all ranks' tensors on one rank."""
        root = opts.rootRank

        def execute(args_by_rank: list[tuple[Sequence[Tensors], Tensors]]) -> None:
            for source, target in enumerate(args_by_rank[root][0][0]):
                self._copy_into("gather", target, args_by_rank[source][1][0])

        return self._join(f"gather to rank {root}", (outputs, inputs), execute, list(outputs[0]) if outputs else [])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> MockWork:
        """Send one of the root's tensors to each rank."""
        root = opts.rootRank

        def execute(args_by_rank: list[tuple[Tensors, Sequence[Tensors]]]) -> None:
            for rank, (target, _) in enumerate(args_by_rank):
                self._copy_into("scatter", target[0], args_by_rank[root][1][0][rank])

        return self._join(f"scatter from rank {root}", (outputs, inputs), execute, list(outputs))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> MockWork:
        """Reduce over ranks and give each rank one tensor."""
        op = opts.reduceOp if opts is not None else _SUM

        def execute(args_by_rank: list[tuple[Tensors, Sequence[Tensors]]]) -> None:
            for rank, (target, _) in enumerate(args_by_rank):
                parts = [inputs[0][rank] for _, inputs in args_by_rank]
                self._check_shapes("reduce_scatter", parts)
                self._copy_into("reduce_scatter", target[0], combine(parts, op))

        return self._join("reduce_scatter", (outputs, inputs), execute, list(outputs))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MockWork:
        """Reduce one tensor over ranks and give each rank one part of it."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MockWork:
        """Like `reduce_scatter_single`, for several tensors at once."""
        op = opts.reduceOp if opts is not None else _SUM

        def execute(args_by_rank: list[tuple[Tensors, Tensors]]) -> None:
            for position in range(len(args_by_rank[0][1])):
                parts = [inputs[position].detach().reshape(-1) for _, inputs in args_by_rank]
                self._check_shapes("reduce_scatter", parts)
                total = combine(parts, op).view(len(args_by_rank), -1)
                for rank, (targets, _) in enumerate(args_by_rank):
                    self._copy_into("reduce_scatter", targets[position].view(-1), total[rank])

        return self._join("reduce_scatter", (outputs, inputs), execute, list(outputs))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MockWork:
        """Send one tensor from each rank to each rank."""

        def execute(args_by_rank: list[tuple[Tensors, Tensors]]) -> None:
            for rank, (targets, _) in enumerate(args_by_rank):
                for source, target in enumerate(targets):
                    self._copy_into("all_to_all", target, args_by_rank[source][1][rank])

        return self._join("all_to_all", (outputs, inputs), execute, list(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> MockWork:
        """Like `alltoall`, with one tensor that is split along dim 0."""
        count = self.size()
        targets = list(output.split(output_sizes) if output_sizes else output.chunk(count))
        parts = list(tensor.split(input_sizes) if input_sizes else tensor.chunk(count))
        return self.alltoall(targets, parts, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> MockWork:
        """Wait for all ranks."""
        return self._join("barrier", None, lambda args_by_rank: None, [])

    def send(self, tensors: Tensors, target: int, tag: int) -> MockWork:
        """Send a message."""
        self._report("send", (tensors,), target)
        message = self._hub.send(self._own_rank, target, tag, tensors[0])
        place = f"send to {name_ranks([self._hub.ranks[target]])}"
        return MockWork(self, lambda: message.is_taken or not self._synchronous_sends, lambda: place, list(tensors))

    def recv(self, tensors: Tensors, source: int, tag: int) -> MockWork:
        """Receive the next message; several receives complete in the order in which they were posted."""
        self._report("recv", (tensors,), source)
        received: list[int] = []

        def on_message(message: torch.Tensor) -> None:
            self._copy_into("recv", tensors[0], message)
            received.append(source)

        self._hub.receive(source, self._own_rank, tag, on_message)
        place = f"recv for {name_ranks([self._hub.ranks[source]])}"
        return MockWork(self, lambda: bool(received), lambda: place, list(tensors))

    def recv_anysource(self, tensors: Tensors, tag: int) -> MockWork:
        """Receive a message from any rank; the lowest rank comes first."""
        self._report("recv", (tensors,))
        received: list[int] = []

        def ready() -> bool:
            if not received and (message := self._hub.receive_any(self._own_rank, tag)) is not None:
                self._copy_into("recv", tensors[0], message[1])
                received.append(message[0])
            return bool(received)

        return MockWork(self, ready, lambda: "recv for any rank", list(tensors), lambda: received[0])

    def _check_shapes(self, name: str, parts: Tensors) -> None:
        for rank, part in enumerate(parts):
            if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
                hint = " Use `all_gather(…, uneven=True)` for different lengths." if name == "all_gather" else ""
                raise errors.TensorMismatchError(
                    f"{name}: rank {self._hub.ranks[0]} passed {parts[0].dtype} of shape {tuple(parts[0].shape)}, rank "
                    f"{self._hub.ranks[rank]} passed {part.dtype} of shape {tuple(part.shape)}; dtype and shape must "
                    f"match on all ranks.{hint}"
                )

    @staticmethod
    def _copy_into(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        if target.numel() != value.numel() or target.dtype != value.dtype:
            raise errors.TensorMismatchError(
                f"{name}: {value.dtype} of shape {tuple(value.shape)} does not fit into a tensor of {target.dtype} and "
                f"shape {tuple(target.shape)}."
            )
        target.detach().copy_(value.detach().reshape(target.shape))


class MockWork(Work):
    """A communication in progress; waiting for it lets the other ranks run.

    Args:
        group: The group of the rank that called it.
        ready: Whether it has completed; the call may complete it.
        waiting_in: Names the call and whom it waits for.
        output: The tensors that the future returns.
        source: Returns the sender's rank.
    """

    def __init__(
        self,
        group: MockGroup,
        ready: Callable[[], bool],
        waiting_in: Callable[[], str],
        output: Any,
        source: Callable[[], int] = lambda: -1,
    ) -> None:
        super().__init__()
        self._source = source
        self._group = group
        self._ready = ready
        self._waiting_in = waiting_in
        self._output = output

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion."""
        self._group.wait_until(self._ready, self._waiting_in)
        return True

    def is_completed(self) -> bool:
        """Whether it has completed."""
        return self._ready()

    def is_success(self) -> bool:
        """Whether it has completed: communication in a mock world cannot fail."""
        return self._ready()

    def exception(self) -> Any:
        """Return None: communication in a mock world cannot fail."""
        return None

    def result(self) -> Any:
        """Return the output tensors."""
        return self._output

    def synchronize(self) -> None:
        """Do nothing."""

    def source_rank(self) -> int:
        """Return the sender's rank; -1 if the call named it."""
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a completed future: its users wait in C++, where no other rank could be scheduled."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._output)
        return future


class PendingCollective(Struct):
    """One collective in progress: the arguments of each rank that has called it."""

    name: str
    first_rank: int
    args_by_rank: dict[int, Any] = field(default_factory=dict)
    done: bool = False


class Message(Struct):
    """A tensor on its way."""

    tensor: torch.Tensor
    is_taken: bool = False
    """Whether a receiver has asked for it."""


class Hub:
    """Shared state of one mock group.

    Args:
        ranks: Global ranks, for messages.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._pending: dict[int, PendingCollective] = {}
        self._counts = [0] * len(ranks)
        self._channels: dict[tuple[int, int, int], _Channel] = {}

    def join(self, rank: int, name: str, args: Any, execute: Callable[[list[Any]], None]) -> PendingCollective:
        """Join a rank's next collective; the last rank to call executes it for all.

        Raises:
            CollectiveMismatchError: another rank made a different call.
        """
        number = self._counts[rank]
        self._counts[rank] += 1
        pending = self._pending.setdefault(number, PendingCollective(name, rank))
        if pending.name != name:
            raise errors.CollectiveMismatchError(
                f"Collective mismatch: rank {self.ranks[pending.first_rank]} called {pending.name}, "
                f"rank {self.ranks[rank]} called {name} on the same group; all ranks must make the same calls in the "
                "same order."
            )
        pending.args_by_rank[rank] = args
        if len(pending.args_by_rank) == len(self.ranks):
            del self._pending[number]
            execute([pending.args_by_rank[member] for member in range(len(self.ranks))])
            pending.done = True
        return pending

    def absent_ranks(self, pending: PendingCollective) -> list[int]:
        """Return the global ranks that have not called it yet."""
        return [self.ranks[rank] for rank in range(len(self.ranks)) if rank not in pending.args_by_rank]

    def send(self, source: int, target: int, tag: int, tensor: torch.Tensor) -> Message:
        """Send a copy of `tensor`, so that the sender can continue."""
        channel = self._channels.setdefault((source, target, tag), _Channel())
        message = Message(tensor.detach().clone())
        channel.messages.append(message)
        channel.deliver()
        return message

    def receive(self, source: int, target: int, tag: int, on_message: Callable[[torch.Tensor], None]) -> None:
        """Pass the next unclaimed message to `on_message`; requests are served in order."""
        channel = self._channels.setdefault((source, target, tag), _Channel())
        channel.receivers.append(on_message)
        channel.deliver()

    def receive_any(self, target: int, tag: int) -> tuple[int, torch.Tensor] | None:
        """Take the oldest message of the lowest rank that has sent one; None if there is none."""
        for source in range(len(self.ranks)):
            channel = self._channels.get((source, target, tag))
            if channel is not None and channel.messages:
                message = channel.messages.popleft()
                message.is_taken = True
                return source, message.tensor
        return None


class _Channel(Struct):
    """A one-way channel between two ranks: queued messages and waiting receivers."""

    messages: deque[Message] = field(default_factory=deque)
    receivers: deque[Callable[[torch.Tensor], None]] = field(default_factory=deque)

    def deliver(self) -> None:
        while self.messages and self.receivers:
            message = self.messages.popleft()
            message.is_taken = True
            self.receivers.popleft()(message.tensor)


def combine(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Combine the tensors of all ranks into one.

    Raises:
        TensorError: mock worlds do not support the operation.
    """
    kind = next((kind for kind in _PAIRWISE if op == kind), None)
    if kind is None:
        raise errors.TensorError(f"mock worlds support {', '.join(kind.name for kind in _PAIRWISE)}; got {op}.")
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total = _PAIRWISE[kind](total, tensor.detach())
    return total / len(tensors) if kind is _OPS.AVG else total
