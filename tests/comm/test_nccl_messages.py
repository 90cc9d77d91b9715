"""Messages of hand-made NCCL worlds: a library in Python, between threads, stands in for NCCL."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb.comm.errors import NcclError
from axon_nb.comm.nccl import Messages, NcclGroup, join_world, register

SIZE = 3


class _Library:
    """NCCL's functions for messages: those between a start and an end are carried together, in the order of a pair."""

    def __init__(self, rank: int, mail: defaultdict[tuple[int, int], queue.Queue[bytes]]) -> None:
        self._rank, self._mail = rank, mail
        self._receives: list[Callable[[], None]] = []
        self.ncclGetErrorString = lambda code: b"invalid argument"

    def ncclGroupStart(self) -> int:
        return 0

    def ncclCommDestroy(self, communicator: Any) -> int:
        return 0

    def ncclSend(self, place: Any, size: Any, dtype: int, peer: int, *_: Any) -> int:
        if peer >= SIZE or dtype != 1:
            return 4
        self._mail[self._rank, peer].put(ctypes.string_at(place.value, size.value))
        return 0

    def ncclRecv(self, place: Any, size: Any, dtype: int, peer: int, *_: Any) -> int:
        def receive() -> None:
            content = self._mail[peer, self._rank].get(timeout=60)
            assert len(content) == size.value
            ctypes.memmove(place.value, content, len(content))

        self._receives.append(receive)
        return 0

    def ncclGroupEnd(self) -> int:
        for receive in self._receives:
            receive()
        self._receives.clear()
        return 0


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _HostGroup(NcclGroup):
    """A group whose calls run at once, on the CPU."""

    def _enqueue_now(self, call: Any, output: Any) -> Any:
        call([self._communicator])
        return _Done()

    def _stream(self) -> int:
        return 0

    def _synchronize(self) -> None:
        pass


def _on_ranks(work: Callable[[NcclGroup, int], Any]) -> list[Any]:
    mail: defaultdict[tuple[int, int], queue.Queue[bytes]] = defaultdict(queue.Queue)
    for pair in ((first, second) for first in range(SIZE) for second in range(SIZE)):
        mail[pair]
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        group = _HostGroup(object(), rank, SIZE, torch.device("cpu"))
        group._messages = Messages(1, _Library(rank, mail))
        register(group)
        try:
            results[rank] = work(group, rank)
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(SIZE)]


def test_ring_of_messages_arrives() -> None:
    def ring(group: NcclGroup, rank: int) -> list[float]:
        received = torch.empty(2, dtype=torch.bfloat16)
        group.send([torch.full((2,), float(rank), dtype=torch.bfloat16)], (rank + 1) % SIZE).wait()
        group.recv([received], (rank - 1) % SIZE).wait()
        return received.tolist()

    assert _on_ranks(ring) == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


def test_gather_scatter_and_all_to_all_as_torch_calls_them() -> None:
    def move(group: NcclGroup, rank: int) -> tuple[Any, ...]:
        own = torch.tensor([rank, rank * 10])
        gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(SIZE)] if rank == 1 else None
        dist.gather(own, gathered, group=group, group_dst=1)
        part = torch.zeros(2, dtype=torch.int64)
        parts = [torch.tensor([i, -i]) for i in range(SIZE)] if rank == 2 else None
        dist.scatter(part, parts, group=group, group_src=2)
        outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(SIZE)]
        dist.all_to_all(outputs, [torch.tensor([10 * rank + i]) for i in range(SIZE)], group=group)
        uneven = torch.zeros(SIZE * (rank + 1), dtype=torch.int64)
        source = torch.arange(6) + 100 * rank
        dist.all_to_all_single(uneven, source, [rank + 1] * SIZE, [1, 2, 3], group=group)
        even = torch.zeros(SIZE, dtype=torch.int64)
        dist.all_to_all_single(even, torch.arange(SIZE) + 10 * rank, group=group)
        whole = gathered and [one.tolist() for one in gathered]
        return whole, part.tolist(), [int(one) for one in outputs], uneven.tolist(), even.tolist()

    first, second, third = _on_ranks(move)
    assert [result[0] for result in (first, second, third)] == [None, [[0, 0], [1, 10], [2, 20]], None]
    assert [result[1] for result in (first, second, third)] == [[0, 0], [1, -1], [2, -2]]
    assert [result[2] for result in (first, second, third)] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert second[3] == [1, 2, 101, 102, 201, 202]
    assert [result[4] for result in (first, second, third)] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_errors_and_a_closed_world_are_reported() -> None:
    def fail(group: NcclGroup, rank: int) -> tuple[str, str, str]:
        with pytest.raises(NcclError) as refused:
            group.send([torch.ones(1)], SIZE)
        with pytest.raises(NcclError) as layout:
            group.recv([torch.ones(4, 4).T[:2]], rank)
        group.close()
        with pytest.raises(NcclError) as closed:
            group.send([torch.ones(1)], rank)
        return str(refused.value), str(layout.value), str(closed.value)

    refused, layout, closed = _on_ranks(fail)[0]
    assert refused == "NCCL: invalid argument."
    assert layout == "hand-made NCCL worlds receive into contiguous tensors only; pass `tensor.contiguous()`."
    assert closed == "this NCCL world is closed; create another one."
    with pytest.raises(NcclError, match=r"hand-made NCCL worlds need libnccl\.so\.2"):
        Messages.of(object())


def test_world_is_joined_through_the_library() -> None:
    class _Joined(_Library):
        def ncclCommInitRank(self, place: Any, size: int, unique_id: Any, rank: int) -> int:
            if bytes(unique_id) != bytes(range(128)):
                return 4
            place._obj.value = 4096 + 16 * size + rank
            return 0

    library = _Joined(0, defaultdict(queue.Queue))
    capsule = join_world(SIZE, bytes(range(128)), 2, library)
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert address(capsule, b"torch.cuda.nccl.Communicator") == 4096 + 16 * SIZE + 2
    with pytest.raises(NcclError, match="NCCL: invalid argument"):
        join_world(SIZE, bytes(128), 0, library)
    with pytest.raises(NcclError, match="a unique id has 128 bytes; got 3"):
        join_world(SIZE, b"abc", 0, library)
