"""reduce_scatter of recoverable groups: torch's own results, bit for bit, and a wait that can be cut into slices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from axon_nb.engine.groups import gloo
from axon_nb.engine.groups.gloo import ReduceScatterWork
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.state import GroupsState

SIZE = 3
LIMIT = timedelta(seconds=60)
c10d: Any = dist.distributed_c10d


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
