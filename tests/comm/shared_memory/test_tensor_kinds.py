"""Every kind, size and stride of tensor: a right result, or an error before any data moves; never a signal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from axon_nb.comm import World
from axon_nb.comm.errors import CollectiveMismatchError, TensorMismatchError
from axon_nb.comm.shared_memory.collectives import rounds as rounds_module
from axon_nb.comm.shared_memory.collectives.algorithms import arithmetic, part_bytes, table_bytes
from axon_nb.comm.shared_memory.collectives.calls import Calls
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.segment.memory import Layout, SharedMemory
from axon_nb.comm.shared_memory.segment.pages import MAX_RANKS
from axon_nb.comm.shared_memory.segment.progress import Progress
from tests.support.ranks import RankWorld

Make = Callable[[int], Any]

PAGE = 4096


class Named(torch.Tensor):
    """A subclass that holds its elements itself."""


def dtensor(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(torch.full((4,), rank + 1.0), init_device_mesh("cpu", (2,)), [Replicate()])


def batched(rank: int) -> Any:
    """What a function sees that `torch.func.vmap` maps."""
    seen: list[Any] = []
    torch.func.vmap(lambda row: seen.append(row) or row)(torch.full((2, 4), rank + 1.0))
    return seen[0]


def fake(rank: int) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.full((4,), rank + 1.0)


def freed(rank: int) -> Any:
    tensor = torch.full((4,), rank + 1.0)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(rank: int) -> Any:
    tensor = torch.full((4,), rank + 1.0)
    tensor.untyped_storage().resize_(8)
    return tensor


def two(rank: int) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.full((4,), rank + 1.0), torch.full((4,), rank + 1.0))


REFUSED: dict[str, Make] = {
    "DTensor": dtensor,
    "parameter of FSDP2": lambda rank: torch.nn.Parameter(dtensor(rank)),
    "FakeTensor": fake,
    "batched by vmap": batched,
    "quantized": lambda rank: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "wrapper subclass": two,
    "meta": lambda rank: torch.ones(4, device="meta"),
    "nested": lambda rank: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
    "nested jagged": lambda rank: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.jagged),
    "sparse rows": lambda rank: torch.eye(4).to_sparse_csr(),
    "mkldnn": lambda rank: torch.ones(4).to_mkldnn(),
    "freed storage": freed,
    "shrunk storage": shrunk,
}
ACCEPTED: dict[str, Make] = {
    "plain": lambda rank: torch.full((4,), rank + 1.0),
    "parameter": lambda rank: torch.nn.Parameter(torch.full((4,), rank + 1.0)),
    "sparse": lambda rank: torch.full((4,), rank + 1.0).to_sparse(),
    "imaginary parts": lambda rank: torch.complex(torch.zeros(4), torch.full((4,), rank + 1.0)).imag,
    "subclass with memory": lambda rank: torch.full((4,), rank + 1.0).as_subclass(Named),
    "negative view": lambda rank: torch.complex(torch.zeros(4), torch.full((4,), -rank - 1.0)).conj().imag,
    "every second": lambda rank: torch.full((8,), rank + 1.0)[::2],
    "transposed": lambda rank: torch.full((2, 2), rank + 1.0).t(),
    "no elements": lambda rank: torch.ones(0),
    "part of a storage": lambda rank: torch.full((9,), rank + 1.0)[3:7],
    "result of a functional collective": lambda rank: functional.all_reduce(
        torch.full((4,), rank + 1.0), "sum", dist.group.WORLD
    ),
}

OPERATIONS: dict[str, Callable[[Any, int], Any]] = {
    "all_reduce": lambda tensor, rank: dist.all_reduce(tensor),
    "all_reduce_coalesced": lambda tensor, rank: dist.all_reduce_coalesced([tensor]),
    "broadcast": lambda tensor, rank: dist.broadcast(tensor, 0),
    "reduce": lambda tensor, rank: dist.reduce(tensor, 0),
    "all_gather": lambda tensor, rank: dist.all_gather([torch.ones(4), torch.ones(4)], tensor),
    "all_gather outputs": lambda tensor, rank: dist.all_gather([tensor, tensor], torch.ones(4)),
    "all_gather_into_tensor": lambda tensor, rank: dist.all_gather_into_tensor(torch.ones(8), tensor),
    "reduce_scatter_tensor": lambda tensor, rank: dist.reduce_scatter_tensor(tensor, torch.ones(8)),
    "scatter": lambda tensor, rank: dist.scatter(tensor, [torch.ones(4), torch.ones(4)] if rank == 0 else None),
    "gather": lambda tensor, rank: dist.gather(tensor, [torch.ones(4), torch.ones(4)] if rank == 0 else None),
    "reduce_scatter": lambda tensor, rank: dist.reduce_scatter(tensor, [torch.ones(4), torch.ones(4)]),
    "reduce_scatter inputs": lambda tensor, rank: dist.reduce_scatter(torch.ones(4), [tensor, tensor]),
    "all_to_all": lambda tensor, rank: dist.all_to_all([tensor, tensor], [torch.ones(4), torch.ones(4)]),
    "batch_isend_irecv": lambda tensor, rank: [
        work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1 - rank)])
    ],
    "send": lambda tensor, rank: dist.send(tensor, 1 - rank),
    "recv": lambda tensor, rank: dist.recv(tensor, 1 - rank),
    "all_to_all_single": lambda tensor, rank: dist.all_to_all_single(tensor, torch.ones(4)),
}


def attempt(world: Any, make: Make, operation: Callable[[Any, int], Any]) -> tuple[str, float]:
    """The kind of error, if any, and what a plain call gives then."""
    rank, error = dist.get_rank(), ""
    try:
        operation(make(rank), rank)
    except Exception as raised:
        error = type(raised).__name__
    after = torch.ones(1)
    dist.all_reduce(after)
    return error, after.item()


def sums(world: Any, make: Make) -> list[float]:
    tensor = make(dist.get_rank())
    dist.all_reduce(tensor)
    return list((tensor.to_dense() if tensor.is_sparse else torch.as_tensor(tensor)).flatten().tolist())


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    """Two ranks over shared memory."""
    world = RankWorld(2, backend="shm")
    yield world
    world.end()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", REFUSED)
def test_tensor_without_host_memory_is_rejected(world: RankWorld, kind: str, operation: str) -> None:
    answers = world.run(attempt, REFUSED[kind], OPERATIONS[operation])
    assert all(error for error, _ in answers), answers
    assert [after for _, after in answers] == [2.0, 2.0]


@pytest.mark.parametrize("kind", ACCEPTED)
def test_tensor_with_memory_is_summed(world: RankWorld, kind: str) -> None:
    expected = {"no elements": [], "result of a functional collective": [6.0] * 4}.get(kind, [3.0] * 4)
    assert world.run(sums, ACCEPTED[kind]) == [expected] * 2


def expanded(world: Any) -> list[Any]:
    rank = dist.get_rank()
    try:
        dist.all_reduce(torch.ones(1).expand(4))
    except Exception as raised:
        refused = str(raised)
    parts = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(parts, torch.full((1,), rank + 1.0).expand(4))
    return [refused, *(part.tolist() for part in parts)]


def test_expanded_tensor_can_be_sent_but_not_written(world: RankWorld) -> None:
    for refused, *parts in world.run(expanded):
        assert "Elements of an expanded tensor share memory" in refused
        assert parts == [[1.0] * 4, [2.0] * 4]


def test_what_gloo_does_otherwise_is_documented_and_said_once() -> None:
    command = [sys.executable, "-m", "scripts.gloo_differences", "--check"]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = Counter(re.findall(r"^axon_nb: (.+) works on these ranks, but torchrun's Gloo", done.stderr, re.MULTILINE))
    assert set(said.values()) == {2}, "one line per rank"
    assert {"communication of int16", "AVG of int64", "PREMUL_SUM of float32", "SUM of bool"} <= set(said)
    assert not {"SUM of float32", "SUM of int64", "communication of float32", "AVG of float32"} & set(said)


@pytest.mark.parametrize("counts", [[1, 2, 3, 0], [0, 0, 7, 0], [700_000, 5, 1_300_000, 40_001]], ids=str)
def test_uneven_parts_reduce_as_on_gloo(shm_world: Any, counts: list[int]) -> None:
    def work(world: World) -> None:
        rank = world.rank()
        gloo = dist.new_group(backend="gloo")
        for dtype, operation in ((torch.float32, "SUM"), (torch.int64, "MAX"), (torch.bfloat16, "SUM")):
            parts = [(torch.arange(count) % 50 + 3 * rank + peer).to(dtype) for peer, count in enumerate(counts)]
            ours, again, theirs = (torch.zeros(counts[rank], dtype=dtype) for _ in range(3))
            dist.reduce_scatter(ours, parts, getattr(dist.ReduceOp, operation))
            handle: Any = dist.reduce_scatter(again, parts, getattr(dist.ReduceOp, operation), async_op=True)
            handle.wait()
            if dtype is not torch.bfloat16:
                dist.reduce_scatter(theirs, parts, getattr(dist.ReduceOp, operation), group=gloo)
            else:
                theirs = sum((torch.arange(counts[rank]) % 50 + 3 * peer + rank) for peer in range(4)).to(dtype)  # type: ignore[union-attr]
            assert torch.equal(ours, theirs)
            assert torch.equal(again, theirs)
        dist.destroy_process_group(gloo)

    shm_world.run(work)


WRONG: dict[str, tuple[Callable[[int], list[int]], type[Exception], list[str]]] = {
    "other parts, as many elements": (
        lambda rank: [2, 1, 3, 0] if rank == 2 else [1, 2, 3, 0],
        TensorMismatchError,
        ["reduce_scatter at line ", "for rank 0, rank 0 passed 1 elements and rank 2 2; must be the same"],
    ),
    "more elements": (
        lambda rank: [1, 2, 3, 9] if rank == 2 else [1, 2, 3, 0],
        CollectiveMismatchError,
        ["rank 2 passed 15 float32 in uneven parts", "ranks 0-1,3 passed 6 float32 in uneven parts"],
    ),
    "even parts": (
        lambda rank: [3] * 4 if rank == 2 else [1, 2, 3, 0],
        CollectiveMismatchError,
        ["rank 2 passed 3 float32", "ranks 0-1,3 passed 6 float32 in uneven parts"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_split_mismatch_raises_on_all_ranks(shm_world: Any, name: str) -> None:
    counts, kind, words = WRONG[name]

    def work(world: World) -> str:
        parts = [torch.ones(count) for count in counts(world.rank())]
        with pytest.raises(kind) as found:
            dist.reduce_scatter(torch.empty(parts[world.rank()].shape), parts)
        dist.all_reduce(tensor := torch.ones(1))
        assert tensor.item() == 4
        return str(found.value)

    sentences = shm_world.run(work)
    assert any(all(word in sentence for word in words) for sentence in sentences), sentences


STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "a column": lambda: torch.arange(24).view(12, 2)[:, 0],
    "transposed": lambda: torch.arange(12).view(3, 4).t(),
    "one element": lambda: torch.arange(8)[::8],
}


@pytest.mark.parametrize("name", STRIDED)
def test_any_last_stride_is_accepted(shm_world: Any, name: str) -> None:
    make = STRIDED[name]

    def work(world: World) -> None:
        rank, n = world.rank(), world.world_size()
        own, whole = make() + rank, [torch.zeros_like(make()) for _ in range(n)]

        def out() -> torch.Tensor:
            made = make()
            return made.zero_()

        target = make()
        dist.all_reduce(target)
        assert torch.equal(target, make() * n)
        target = make()
        target += rank
        dist.broadcast(target, 2)
        assert torch.equal(target, make() + 2)
        dist.all_gather(whole, own)
        assert all(torch.equal(part, make() + peer) for peer, part in enumerate(whole))
        dist.reduce_scatter(target := out(), [make() + peer for peer in range(n)])
        assert torch.equal(target, (make() + rank) * n)
        dist.scatter(target := out(), [make() + peer for peer in range(n)] if rank == 1 else None, 1)
        assert torch.equal(target, make() + rank)
        taken = [out() for _ in range(n)]
        dist.all_to_all(taken, [make() + peer for peer in range(n)])
        assert all(torch.equal(part, make() + rank) for part in taken)
        handle: Any = dist.isend(own, (rank + 1) % n)
        dist.recv(target := out(), (rank - 1) % n)
        handle.wait()
        assert torch.equal(target, make() + (rank - 1) % n)

    shm_world.run(work)


def run(size: int, layout: Layout, work: Callable[[Calls, Rounds, int], Any]) -> list[Any]:
    """What `work` returns on ranks that are threads of this process."""
    descriptor = SharedMemory.create(layout)
    ranks = [Progress(SharedMemory(descriptor, layout), rank, range(size), None) for rank in range(size)]
    os.close(descriptor)
    found: dict[int, Any] = {}

    def serve(rank: int) -> None:
        rounds = Rounds(ranks[rank], 60.0)
        found[rank] = work(Calls(rounds), rounds, rank)

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("limit", [1, 16 << 20, 0], ids=["smallest", "16 MiB", "usual"])
def test_slot_has_room_for_each_rank_at_any_limit(limit: int) -> None:
    for size in range(1, MAX_RANKS + 1):
        layout = Layout.of(size, limit)
        assert layout.slot_bytes % PAGE == layout.piece_bytes % PAGE == 0
        for table in (0, table_bytes(2 * size)):
            part = part_bytes(layout.slot_bytes, size, table)
            assert part >= 64
            assert table + size * part <= layout.slot_bytes
    assert Layout.of(16, 1).slot_bytes == Layout.of(16, 1).piece_bytes == PAGE


def test_60_ranks_exchange_tensors_in_minimum_memory() -> None:
    size = 60

    def work(calls: Calls, rounds: Rounds, rank: int) -> torch.Tensor:
        output = torch.zeros(size, 40, dtype=torch.int32)
        parts = [output[0].nbytes] * size
        sent = (torch.arange(size, dtype=torch.int32) + size * rank).repeat_interleave(40)
        calls.all_to_all_single(output, sent, parts, parts, 1)
        return output

    expected = size * torch.arange(size, dtype=torch.int32).repeat_interleave(40).view(size, 40)
    for rank, output in enumerate(run(size, Layout.of(size, 1), work)):
        assert torch.equal(output, expected + rank)


@pytest.mark.parametrize("pieces", [4, 5, 6, 7, 8, 9, 14, 30])
def test_collective_with_more_steps_than_its_counter_holds(monkeypatch: Any, pieces: int) -> None:
    monkeypatch.setattr(rounds_module, "STEPS", 8)
    size = 2

    def work(calls: Calls, rounds: Rounds, rank: int) -> list[torch.Tensor]:
        found = []
        sums = arithmetic(torch.int32, 0, size)
        for number in range(3):
            count = pieces * PAGE // 4
            own = torch.arange(count, dtype=torch.int32) + 1000 * rank + number
            calls.all_reduce(total := own.clone(), 0, sums, 1)
            calls.broadcast(copied := own.clone(), 1, 1)
            output = torch.zeros(count // 2, dtype=torch.int32)
            calls.scatter(output, list(own.chunk(2)) if rank == 0 else [], 0, 1)
            calls.all_to_all_single(swapped := torch.zeros_like(own), own, [2 * count] * 2, [2 * count] * 2, 1)
            calls.barrier(1)
            found += [total, copied, output, swapped]
        assert (rounds.sequence > 15) == (pieces > 4)  # numbers were skipped; an all_to_all also has a table
        return found

    for rank, found in enumerate(run(size, Layout.of(size, 1), work)):
        for number in range(3):
            total, copied, output, swapped = found[4 * number : 4 * number + 4]
            base = torch.arange(pieces * PAGE // 4, dtype=torch.int32) + number
            half = base.chunk(2)[rank]
            assert torch.equal(total, 2 * base + 1000)
            assert torch.equal(copied, base + 1000)
            assert torch.equal(output, half)
            assert torch.equal(swapped, torch.cat([half, half + 1000]))
