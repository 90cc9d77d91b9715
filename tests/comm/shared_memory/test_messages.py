"""Sends and receives over shared memory, in every order in which two ranks start them and move their pieces.

For the orders, the ranks are two objects in this thread, over real memory. A move starts the next operation of a rank,
or lets it put or take one piece; every order of moves is tried, up to states that were seen before.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from axon_nb.comm import World
from axon_nb.comm.errors import TensorMismatchError
from axon_nb.comm.shared_memory.messages import ANY, Messages, Receive
from axon_nb.comm.shared_memory.segment.memory import InRing, Layout, OutRing, SharedMemory
from axon_nb.comm.shared_memory.segment.pages import GroupLeftError
from axon_nb.comm.shared_memory.segment.progress import Progress
from axon_nb.comm.shared_memory.work import SharedWork

pytestmark = pytest.mark.timeout(600)

DTYPE = 1


def test_tagged_any_source_and_large_messages(shm_world: Any) -> None:
    def work(world: World) -> None:
        import torch.distributed as dist

        rank, n = world.rank(), world.world_size()
        right, left = (rank + 1) % n, (rank - 1) % n
        # Large ones both ways at once, and a small one with another tag that is asked for first.
        large = torch.arange(3_000_000, dtype=torch.int32) + rank
        handles = [dist.isend(large, right, tag=1), dist.isend(torch.tensor([rank]), right, tag=2)]
        small, received = torch.empty(1, dtype=torch.int64), torch.empty_like(large)
        dist.recv(small, left, tag=2)
        dist.recv(received, left, tag=1)
        assert small.item() == left
        assert torch.equal(received, large - rank + left)
        for handle in handles:
            handle.wait()
        if rank == 0:
            seen = set()
            for _ in range(n - 1):
                tensor = torch.empty(4, 3).t()
                source = dist.recv(tensor, tag=7)
                assert tensor.unique().tolist() == [float(source)]
                seen.add(source)
            assert seen == set(range(1, n))
        else:
            dist.send(torch.full((3, 4), float(rank)), 0, tag=7)
        operations = [
            dist.P2POp(dist.isend, torch.full((500_000,), float(rank)), right),
            dist.P2POp(dist.irecv, batch := torch.empty(500_000), left),
        ]
        for handle in dist.batch_isend_irecv(operations):
            handle.wait()
        assert batch.unique().tolist() == [float(left)]

    shm_world.run(work)


def test_unawaited_receives_complete(shm_world: Any) -> None:
    def work(world: World) -> None:
        import torch.distributed as dist

        rank = world.rank()
        large = torch.full((8_000_000,), float(rank))
        if rank == 0:
            handle = dist.irecv(taken := torch.empty(8_000_000), 1)
        elif rank == 1:
            dist.send(large, 0)  # does not fit into the ring: rank 0 has to take it while it waits for the barrier
        dist.barrier()
        if rank == 0:
            handle.wait()
            assert taken.unique().tolist() == [1.0]

    shm_world.run(work)


@pytest.mark.parametrize("first", ["the send", "the receive"])
def test_oversized_message_raises_at_the_receiver(shm_world: Any, first: str) -> None:
    def work(world: World) -> str:
        import torch.distributed as dist

        group: Any = dist.new_group(backend="shm")
        ring = group._messages._out[1]
        put = ring.put

        def put_and_be_refused(head: Any, address: int) -> int:
            """Return from writing the piece when the receiver has refused it: no receiver is faster."""
            count: int = put(head, address)
            limit = time.monotonic() + 60
            while ring.refused()[0] != head.number and time.monotonic() < limit:
                time.sleep(0.001)
            assert ring.refused()[:2] == (head.number, 16)
            return count

        sentence = ""
        if world.rank() == 0:
            if first == "the receive":
                ring.put = put_and_be_refused
            dist.send(torch.ones(10), 1, group=group)
        if first == "the send":
            dist.barrier()
        if world.rank() == 1:
            with pytest.raises(RuntimeError) as caught:
                dist.recv(torch.ones(4), 0, group=group)
            sentence = str(caught.value)
        dist.barrier(group)
        return sentence

    assert "rank 0 sends 40 bytes" in shm_world.run(work)[1]


@dataclass(frozen=True)
class Send:
    tag: int
    size: int


@dataclass(frozen=True)
class Recv:
    tag: int
    size: int
    source: int | None = None


Program = tuple[Send | Recv, ...]
PROGRAMS: dict[str, tuple[Program, Program]] = {
    "one message longer than the ring": ((Send(0, 6),), (Recv(0, 6),)),
    "tags in another order": ((Send(1, 2), Send(2, 3)), (Recv(2, 3), Recv(1, 2))),
    "both ways": ((Send(0, 3), Recv(0, 2)), (Send(0, 2), Recv(0, 3))),
    "from any rank": ((Send(1, 2), Send(1, 1)), (Recv(1, 2, ANY), Recv(1, 1))),
    "sizes that differ": ((Send(0, 6), Send(1, 1)), (Recv(0, 2), Recv(1, 1))),
    "empty": ((Send(0, 0), Send(0, 1)), (Recv(0, 0), Recv(0, 1))),
}


class Gate:
    """Lets a rank put or take as many pieces as it has been allowed."""

    def __init__(self) -> None:
        self.puts = self.takes = 0


class Rank:
    """The messages of one rank, and the operations that it starts."""

    def __init__(self, progress: Progress, program: Program) -> None:
        self.messages = Messages(progress, "unused", 60.0, lambda error: progress.leave(str(error) or "failed"))
        self.program, self.gate, self.started = program, Gate(), 0
        self.works: list[SharedWork] = []
        self.buffers: list[Any] = []
        peer = 1 - progress.rank
        self.out, self.incoming = self.messages._out[peer], self.messages._in[peer]
        self.piece = progress.memory.layout.piece_bytes
        self.peer, self.progress = peer, progress
        self._close_gate(self.out, self.incoming)

    def _close_gate(self, out: OutRing, incoming: InRing) -> None:
        room, put, head, take, gate = out.room, out.put, incoming.head, incoming.take, self.gate

        def put_one(*arguments: Any) -> int:
            gate.puts -= 1
            return put(*arguments)

        def take_one(*arguments: Any) -> int:
            gate.takes -= 1
            return take(*arguments)

        out.room = lambda: gate.puts > 0 and room()  # type: ignore[method-assign]
        out.put = put_one  # type: ignore[method-assign]
        incoming.head = lambda: head() if gate.takes > 0 else None  # type: ignore[method-assign]
        incoming.take = take_one  # type: ignore[method-assign]

    def start(self) -> None:
        """Start the next operation."""
        operation, number = self.program[self.started], self.started
        self.started += 1
        size = max(0, operation.size * self.piece - 8 * (operation.size > 1))
        work, first = SharedWork([]), 1 + 10 * number + 100 * self.progress.rank
        text = b"".join(bytes([first + piece]) * self.piece for piece in range(operation.size))[:size]
        buffer = ctypes.create_string_buffer(text if isinstance(operation, Send) else b"\0" * size, size + 1)
        self.works.append(work)
        self.buffers.append(buffer)
        address = ctypes.addressof(buffer)
        if isinstance(operation, Send):
            self.messages.send(work, address, size, dtype=DTYPE, peer=self.peer, tag=operation.tag, line=1)
        else:
            source = self.peer if operation.source is None else operation.source
            self.messages.receive(Receive(work, address, size, DTYPE, source, operation.tag, None))

    def move(self, *, puts: int = 0, takes: int = 0) -> None:
        """Put or take a piece, if there is one."""
        self.gate.puts, self.gate.takes = puts, takes
        self.messages._advance(lambda: False)
        self.gate.puts = self.gate.takes = 0

    def has_piece(self) -> bool:
        """Whether a piece is in the ring from the other rank."""
        return self.incoming.sent() > self.progress.words[self.incoming._taken]

    def state(self) -> tuple[Any, ...]:
        kept = tuple((arrival.head.tag, arrival.done) for arrival in self.messages._kept)
        done = tuple(work.is_completed() for work in self.works)
        contents = tuple(buffer.raw for buffer in self.buffers)
        memory = self.progress.memory
        start = memory.layout.sent(0, 0)  # the counters and rings
        return self.started, done, kept, contents, hash(memory.bytes[start:])


@contextmanager
def played(programs: tuple[Program, Program], moves: tuple[tuple[int, str], ...]) -> Iterator[list[Rank]]:
    """Two ranks after these moves."""
    layout = Layout.of(2, 1)
    descriptor = SharedMemory.create(layout)
    ranks = [
        Rank(Progress(SharedMemory(descriptor, layout), number, [0, 1], None), program)
        for number, program in enumerate(programs)
    ]
    os.close(descriptor)
    for number, kind in moves:
        rank = ranks[number]
        try:
            if kind == "start":
                rank.start()
            elif kind == "leave":
                rank.messages.fail(GroupLeftError("this rank left"))
            else:
                rank.move(puts=kind == "put", takes=kind == "take")
        except GroupLeftError as error:
            rank.messages.fail(error)
    yield ranks


def check(ranks: list[Rank]) -> None:
    """What is complete is right, whatever else is not."""
    for rank in ranks:
        for number, (operation, work) in enumerate(zip(rank.program, rank.works, strict=False)):
            if not isinstance(operation, Recv) or not work.is_success():
                continue
            sender = ranks[rank.peer]
            (match,) = [
                other for other, sent in enumerate(sender.program)
                if isinstance(sent, Send) and (sent.tag, sent.size) == (operation.tag, operation.size)
            ]  # fmt: skip
            assert sender.started > match
            assert rank.buffers[number].raw == sender.buffers[match].raw
            assert work.source_rank() == rank.peer


def check_that_waits_end(ranks: list[Rank]) -> None:
    """One rank has left: its messages have failed, and so does a wait of the other rank."""
    for rank in ranks:
        if not rank.progress.left and not all(work.is_completed() for work in rank.works):
            with pytest.raises(GroupLeftError):
                rank.messages._step(float("inf"), rank.messages)
        elif rank.progress.left:
            assert all(work.is_completed() for work in rank.works)


@pytest.mark.parametrize("leaves", [False, True], ids=["all stay", "a rank leaves"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_delivers_each_message(name: str, leaves: bool) -> None:
    programs = PROGRAMS[name]
    seen: set[tuple[Any, ...]] = set()
    stack: list[tuple[tuple[int, str], ...]] = [()]
    ends = 0
    while stack:
        path = stack.pop()
        with played(programs, path) as ranks:
            check(ranks)
            has_left = any(kind == "leave" for _, kind in path)
            key = (*(rank.state() for rank in ranks), has_left)
            if key in seen:
                continue
            seen.add(key)
            if has_left:
                check_that_waits_end(ranks)
                continue
            moves = [(n, "start") for n, rank in enumerate(ranks) if rank.started < len(rank.program)]
            moves += [(n, "put") for n, rank in enumerate(ranks) if any(rank.messages._sends)]
            moves += [(n, "take") for n, rank in enumerate(ranks) if rank.has_piece()]
            if not moves:
                ends += 1
                for rank in ranks:
                    for operation, work in zip(rank.program, rank.works, strict=True):
                        fits = name != "sizes that differ" or operation.tag != 0
                        assert work.is_completed()
                        assert work.is_success() == fits or isinstance(operation, Send)
                        assert work.is_success() or isinstance(work.exception(), TensorMismatchError)
            moves += [(n, "leave") for n in range(2) if leaves]
            stack += [(*path, move) for move in moves]
    assert ends
    assert len(seen) > 10


@pytest.mark.parametrize(
    ("kind", "name", "program"),
    [(OutRing, "room", "one message longer than the ring"), (Receive, "fits", "tags in another order")],
    ids=["a ring that is full", "tags"],
)
def test_protocol_error_is_detected(kind: Any, name: str, program: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(kind, name, lambda *_: True)
    with pytest.raises(AssertionError):
        test_every_order_delivers_each_message(program, leaves=False)
