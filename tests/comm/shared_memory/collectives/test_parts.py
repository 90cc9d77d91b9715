"""Parts of several sizes and tensors of any stride, as on Gloo in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb.comm import World
from axon_nb.comm.errors import CollectiveMismatchError, TensorMismatchError


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
