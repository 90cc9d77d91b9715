"""What is done for groups of Gloo: sizes are checked, sums name the missing part, connections have their time."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from axon_nb.engine.groups import gloo
from axon_nb.engine.groups.gloo import GlooTransport, ReduceScatterWork
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.size_check import SizeTable
from axon_nb.engine.groups.state import GroupsState
from axon_nb.errors import UsageError
from tests.support.ranks import forked

COUNT = 20_000
SIZE = 3
LIMIT = timedelta(seconds=60)

LATE_S = 4.0


def _check_in_step(folder: Path, rank: int, kind: str) -> None:
    state = GroupsState()
    state.begin_run("1")
    table = SizeTable(folder, state, name="0", epoch=1, rank=rank, size=2)
    with (folder / "done").open("r+b") as file:
        done = memoryview(mmap.mmap(file.fileno(), 24)).cast("q")
    done[rank] = 1
    tensors, end = [torch.empty(size) for size in range(1, 12)], time.monotonic() + 15
    for number in range(1, COUNT):
        if rank == 0 and time.monotonic() > end:  # two processes in step are slow where many others run
            done[2] = done[2] or number + 3
        if number == done[2]:
            break
        while done[1 - rank] < number:  # in step: both come to each operation at about the same time
            os.sched_yield()
        brought = [tensors[number % 11]]
        if kind == "pairs":
            table.check_point_to_point("send" if rank == 0 else "recv", (brought, 1 - rank, 0), lambda: [0, 1])
        else:
            table.check_collective("allreduce", (brought,), number, lambda: [0, 1])
        done[rank] = number + 1


@pytest.mark.parametrize("kind", ["pairs", "collectives"])
def test_equal_sizes_pass_in_any_interleaving(tmp_path: Path, kind: str) -> None:
    (tmp_path / "done").write_bytes(bytes(24))
    ranks = [forked(_check_in_step, tmp_path, rank, kind) for rank in range(2)]
    try:
        for process in ranks:
            process.join(150)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.join()


class Interleaved:
    """The words of a table, with something done before each access to them."""

    def __init__(self, words: Any, before: Callable[[int], None]) -> None:
        self._words, self._before, self.accesses = words, before, 0

    def __getitem__(self, key: Any) -> Any:
        self._count()
        return self._words[key]

    def __setitem__(self, key: Any, value: int) -> None:
        self._count()
        self._words[key] = value

    def _count(self) -> None:
        self._before(self.accesses)
        self.accesses += 1


@pytest.mark.parametrize("kind", ["pairs", "collectives"])
@pytest.mark.parametrize("ahead", [1, 8, 9])
def test_sizes_are_checked_in_every_interleaving(tmp_path: Path, kind: str, ahead: int) -> None:
    tensors = [torch.empty(size) for size in range(1, 40)]
    state = GroupsState()
    state.begin_run("3")

    def call(table: SizeTable, rank: int, number: int) -> None:
        brought = [tensors[number % len(tensors)]]
        if kind == "pairs":
            table.check_point_to_point("send" if rank == 0 else "recv", (brought, 1 - rank, 0), lambda: [0, 1])
        else:
            table.check_collective("allreduce", (brought,), number, lambda: [0, 1])

    for writer in range(2):
        interrupted_at = accesses = 0
        while interrupted_at <= accesses:
            folder = tmp_path / f"{writer}-{interrupted_at}"
            folder.mkdir()
            tables = [SizeTable(folder, state, name="0", epoch=1, rank=rank, size=2) for rank in range(2)]
            for number in range(1, 4):
                call(tables[writer], writer, number)

            def come(
                access: int, tables: list[SizeTable] = tables, at: int = interrupted_at, rank: int = writer
            ) -> None:
                if access == at:
                    for number in range(1, 4 + ahead):
                        call(tables[1 - rank], 1 - rank, number)

            words = Interleaved(tables[writer]._words, come)
            tables[writer]._words = words  # type: ignore[assignment]
            call(tables[writer], writer, 4)
            accesses, interrupted_at = words.accesses, interrupted_at + 1
        assert accesses >= 3


def test_late_rank_gets_mismatch_error(tmp_path: Path) -> None:
    state = GroupsState()
    tables = [SizeTable(tmp_path, state, name="0", epoch=1, rank=rank, size=2) for rank in range(2)]
    state.begin_run("2")
    small, large = torch.empty(2), torch.empty(3)
    tables[0].check_collective("allreduce", ([small],), 1, lambda: [4, 5])
    with pytest.raises(UsageError, match="rank 5 passed 3 float32, rank 4 passed 2 float32"):
        tables[1].check_collective("allreduce", ([large],), 1, lambda: [4, 5])
    tables[1].check_point_to_point("recv", ([small], 0, 7), lambda: [4, 5])
    with pytest.raises(UsageError, match="rank 4 sends 12 bytes, but rank 5 receives into 8 bytes"):
        tables[0].check_point_to_point("send", ([large], 1, 7), lambda: [4, 5])


def test_operation_and_reduction_mismatches_raise(tmp_path: Path) -> None:
    state = GroupsState()
    tables = [SizeTable(tmp_path, state, name="0", epoch=1, rank=rank, size=2) for rank in range(2)]
    sum_, max_ = c10d.AllreduceOptions(), c10d.AllreduceOptions()
    max_.reduceOp = c10d.ReduceOp.MAX
    tensor = torch.empty(2)
    tables[0].check_collective("allreduce", ([tensor], sum_), 1, lambda: [4, 5])
    with pytest.raises(UsageError, match=r"rank 5 passed 2 float32 with ReduceOp.MAX, rank 4 passed .* ReduceOp.SUM"):
        tables[1].check_collective("allreduce", ([tensor], max_), 1, lambda: [4, 5])
    tables[0].check_collective("allgather", ([[tensor, tensor]], [tensor]), 2, lambda: [4, 5])
    with pytest.raises(UsageError, match=r"Collective mismatch: rank 5 is in all_reduce, rank 4 in all_gather, on the"):
        tables[1].check_collective("allreduce", ([tensor], sum_), 2, lambda: [4, 5])


def test_splits_are_compared_pairwise(tmp_path: Path) -> None:
    state = GroupsState()
    tables = [SizeTable(tmp_path, state, name="0", epoch=1, rank=rank, size=2) for rank in range(2)]
    three, four = torch.empty(3), torch.empty(4)
    tables[0].check_collective("alltoall_base", (four, four, [1, 3], [1, 3], None), 1, lambda: [4, 5])
    tables[1].check_collective("alltoall_base", (four, four, [3, 1], [3, 1], None), 1, lambda: [4, 5])
    tables[0].check_collective("alltoall_base", (four, four, [], [], None), 2, lambda: [4, 5])
    tables[1].check_collective("alltoall_base", (four, four, [2, 2], [2, 2], None), 2, lambda: [4, 5])
    tables[0].check_collective("alltoall_base", (four, four, [1, 3], [1, 3], None), 3, lambda: [4, 5])
    with pytest.raises(UsageError, match="rank 4 sends 12 bytes to rank 5, which expects 8 bytes"):
        tables[1].check_collective("alltoall_base", (three, four, [2, 1], [3, 1], None), 3, lambda: [4, 5])


@pytest.fixture(scope="module")
def groups() -> list[RecoverableGroup]:
    """One group, as three ranks of this process hold it."""
    made: dict[int, RecoverableGroup] = {}
    store = HashStore()

    def make(rank: int) -> None:
        made[rank] = RecoverableGroup(
            GroupsState(), store, epoch=0, rank=rank, size=SIZE, timeout=LIMIT, name="0", global_rank=rank
        )

    as_ranks(make)
    for group in made.values():
        group.state.gloo.abandon(group._inner)  # a Gloo group that ends while others still look at it may hang
    return [made[rank] for rank in range(SIZE)]


def as_ranks(work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns on each rank, a thread each."""
    answers: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: answers.__setitem__(rank, work(rank)), daemon=True)
        for rank in range(SIZE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == SIZE, f"ranks {sorted(answers)} alone have ended"
    return [answers[rank] for rank in range(SIZE)]


def options(op: Any = dist.ReduceOp.SUM) -> Any:
    """As torch's functions make them."""
    made = c10d.ReduceScatterOptions()
    made.reduceOp = op
    return made


def name_of(group: Any) -> str:
    """The operation, by the name that this torch has for it."""
    return "reduce_scatter_single" if hasattr(group, "reduce_scatter_single") else "_reduce_scatter_base"


def test_torch_has_the_hook() -> None:
    assert gloo._num_modes is not None
    assert gloo._num_modes() == 0


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_result_is_bitwise_identical_to_torch(groups: list[RecoverableGroup], dtype: torch.dtype, op: Any) -> None:
    def work(rank: int) -> tuple[bool, bool, bool]:
        group = groups[rank]
        given = (torch.randn(6, 500, generator=torch.Generator().manual_seed(rank)) * 9).to(dtype)
        before, ours, theirs = given.clone(), torch.empty(2, 500, dtype=dtype), torch.empty(2, 500, dtype=dtype)
        work = getattr(group, name_of(group))(ours, given, options(op))
        reduce_scatter_via_all_reduce = type(work._inner) is ReduceScatterWork
        work.wait()
        getattr(dist.ProcessGroup, name_of(group))(group._inner, theirs, given, options(op)).wait()
        return reduce_scatter_via_all_reduce, torch.equal(ours, theirs), torch.equal(given, before)

    assert as_ranks(work) == [(True, True, True)] * SIZE


def test_timed_out_wait_can_be_repeated(groups: list[RecoverableGroup]) -> None:
    slow = threading.Event()

    def work(rank: int) -> Any:
        group = groups[rank]
        out, given = torch.zeros(1), torch.full((SIZE,), float(rank + 1))
        if rank == 2:
            assert slow.wait(60)
        begun = getattr(group, name_of(group))(out, given, options())
        if rank == 0:
            with pytest.raises(RuntimeError, match="timed out"):
                begun._inner.wait(timedelta(milliseconds=20))
            assert not begun.is_completed()
            slow.set()
        begun.wait()
        begun.wait()
        return out.item(), begun.is_completed(), [part.item() for part in begun.result()]

    assert as_ranks(work) == [(6.0, True, [6.0])] * SIZE


def test_future_holds_the_output(groups: list[RecoverableGroup]) -> None:
    def work(rank: int) -> Any:
        group = groups[rank]
        out, given = torch.zeros(2), torch.ones(2 * SIZE)
        begun = getattr(group, name_of(group))(out, given, options())
        (value,) = begun.get_future().wait()
        return value.tolist(), out.tolist()

    assert as_ranks(work) == [([3.0, 3.0], [3.0, 3.0])] * SIZE


class Sees(TorchDispatchMode):
    """Notes what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_the_original_call(groups: list[RecoverableGroup]) -> None:
    def work(rank: int) -> Any:
        group, out = groups[rank], torch.zeros(1)
        with Sees() as seen:
            getattr(group, name_of(group))(out, torch.ones(SIZE), options()).wait()
        return out.item(), any("reduce_scatter" in name for name in seen.names)

    assert as_ranks(work) == [(3.0, True)] * SIZE


def test_invalid_arguments_are_left_to_torch(groups: list[RecoverableGroup]) -> None:
    def work(rank: int) -> str:
        group = groups[rank]
        with pytest.raises((RuntimeError, ValueError)) as caught:
            getattr(group, name_of(group))(torch.zeros(2), torch.ones(SIZE), options())
        return type(caught.value).__name__

    assert len(set(as_ranks(work))) == 1


def test_late_rank_is_waited_for_when_connecting() -> None:
    store, gloo, made = HashStore(), GlooTransport(), dict[int, Any]()

    def join(rank: int) -> None:
        made[rank] = gloo.connect(store, rank, 2, timeout=timedelta(seconds=60), raise_if_cancelled=lambda: None)

    first = threading.Thread(target=join, args=(0,))
    first.start()
    time.sleep(LATE_S)
    join(1)
    first.join(120)
    sums = [torch.ones(1), torch.ones(1)]
    works = [made[rank].allreduce([sums[rank]]) for rank in (0, 1)]
    assert all(work.wait() for work in works)
    assert [value.item() for value in sums] == [2.0, 2.0]
