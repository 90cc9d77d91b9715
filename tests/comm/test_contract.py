"""Every backend matches NumPy: one suite for the mock world and for real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axon_nb import comm
from axon_nb.comm import ReduceOp, World
from axon_nb.comm import world as query
from tests.support.cases.pairwise import pairwise
from tests.support.ranks import RankWorld

N = 4
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
LAYOUTS = ["dense", "transposed", "strided", "empty", "scalar"]
CASES = [
    *pairwise(["mock", "gloo", "shm"], DTYPES, LAYOUTS),
    *(pytest.param("nccl", dtype, layout, marks=pytest.mark.gpu) for dtype in DTYPES for layout in LAYOUTS),
]
"""Each dtype with each layout on one backend at least; with NCCL all."""


def value(dtype: torch.dtype, layout: str, rank: int) -> torch.Tensor:
    """Small integers, so that every order of summation gives the same bits."""
    count = {"dense": 6, "transposed": 6, "strided": 12, "empty": 0, "scalar": 1}[layout]
    base = (torch.arange(count) * 7 + rank * 5) % 4
    tensor = (base + 1j * (base % 2) if dtype.is_complex else base).to(dtype)
    if layout == "transposed":
        return tensor.view(2, 3).t()
    if layout == "strided":
        return tensor[::2]
    return tensor[0] if layout == "scalar" else tensor


def reduced(dtype: torch.dtype, layout: str, op: ReduceOp) -> torch.Tensor:
    """Return the expected result, computed in one process."""
    parts = torch.stack([value(dtype, layout, rank) for rank in range(N)])
    if dtype is torch.bool:
        return parts.any(0) if op in (ReduceOp.SUM, ReduceOp.MAX) else parts.all(0)
    match op:
        case ReduceOp.SUM:
            return parts.sum(0).to(dtype)
        case ReduceOp.PRODUCT:
            return parts.prod(0).to(dtype)
        case ReduceOp.MIN:
            return parts.amin(0)
        case ReduceOp.MAX:
            return parts.amax(0)
        case ReduceOp.AVERAGE:
            return parts.sum(0) / N


def sensible(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether the operation is defined."""
    if op is ReduceOp.AVERAGE:
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX))


@pytest.mark.parametrize(("world", "dtype", "layout"), CASES, indirect=["world"], ids=str)
def test_all_reduce(world: Any, dtype: torch.dtype, layout: str) -> None:
    ops = [op for op in ReduceOp if sensible(dtype, op)]

    def work(world: World) -> list[tuple[bool, torch.Tensor]]:
        answers = []
        for op in ops:
            tensor = value(dtype, layout, world.rank())
            answers.append((comm.all_reduce(tensor, op) is tensor, tensor))
        return answers

    for answers in world.run(work):
        for op, (same, tensor) in zip(ops, answers, strict=True):
            assert same
            torch.testing.assert_close(tensor, reduced(dtype, layout, op), rtol=0, atol=0)


@pytest.mark.parametrize(("world", "dtype", "layout"), CASES, indirect=["world"], ids=str)
def test_collectives_that_move_tensors(world: Any, dtype: torch.dtype, layout: str) -> None:
    def work(world: World) -> Any:
        own = value(dtype, layout, world.rank())
        sent = comm.broadcast(own.clone(), src=2)
        gathered = comm.all_gather(own)
        at_one = comm.gather_tensor(own, dst=1)
        right, left = (world.rank() + 1) % N, (world.rank() - 1) % N
        handle = comm.send(own, right, async_op=True)
        received = comm.recv(left)
        handle.wait()
        return sent, gathered, at_one, received

    values = [value(dtype, layout, rank) for rank in range(N)]
    joined = torch.cat([item.reshape(1) if item.ndim == 0 else item for item in values])
    for rank, (sent, gathered, at_one, received) in enumerate(world.run(work)):
        torch.testing.assert_close(sent, values[2], rtol=0, atol=0)
        torch.testing.assert_close(gathered, joined, rtol=0, atol=0)
        assert (at_one is None) == (rank != 1)
        if at_one is not None:
            torch.testing.assert_close(at_one, joined, rtol=0, atol=0)
        torch.testing.assert_close(received, values[(rank - 1) % N], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_and_reduce_scatter(world: Any, dtype: torch.dtype) -> None:
    def whole(rank: int) -> torch.Tensor:
        return ((torch.arange(8 * 3) + rank) % 3).view(8, 3).to(dtype)

    def work(world: World) -> Any:
        source = whole(7) if world.rank() == 3 else None
        out = torch.empty(2, 3, dtype=dtype)
        part = comm.scatter_tensor(source, src=3)
        same = comm.scatter_tensor(source, src=3, out=out) is out
        return part, out, same, comm.reduce_scatter_sum(whole(world.rank()))

    total = torch.stack([whole(rank) for rank in range(N)])
    expected = total.any(0) if dtype is torch.bool else total.sum(0).to(dtype)
    for rank, (part, out, same, reduced_part) in enumerate(world.run(work)):
        torch.testing.assert_close(part, whole(7)[2 * rank : 2 * rank + 2], rtol=0, atol=0)
        torch.testing.assert_close(out, part, rtol=0, atol=0)
        assert same
        torch.testing.assert_close(reduced_part, expected[2 * rank : 2 * rank + 2], rtol=0, atol=0)


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)
PROPERTY = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(
    shape=SHAPES, dim=st.integers(-3, 2), lengths=st.lists(st.integers(0, 3), min_size=N, max_size=N), data=st.data()
)
@PROPERTY
def test_uneven_all_gather_is_concatenate(
    world: Any, shape: tuple[int, ...], dim: int, lengths: list[int], data: st.DataObject
) -> None:
    dim = dim % len(shape)

    def array(rank: int) -> np.ndarray[Any, Any]:
        own = list(shape)
        own[dim] = lengths[rank]
        return (np.arange(np.prod(own), dtype=np.float32) + 100 * rank).reshape(own)

    def work(world: World) -> Any:
        return comm.all_gather(array(world.rank()), dim=dim, uneven=True)

    expected = np.concatenate([array(rank) for rank in range(N)], axis=dim)
    for result in world.run(work):
        assert isinstance(result, np.ndarray)
        np.testing.assert_array_equal(result, expected)


@given(shape=SHAPES, ranks=st.sets(st.integers(0, N - 1), min_size=1), op=st.sampled_from(list(ReduceOp)))
@PROPERTY
def test_groups_reduce_among_themselves(world: Any, shape: tuple[int, ...], ranks: set[int], op: ReduceOp) -> None:
    def array(rank: int) -> np.ndarray[Any, Any]:
        return ((np.arange(np.prod(shape)) * (rank + 2)) % 5).reshape(shape).astype(np.float64)

    def work(world: World) -> Any:
        group = world.new_group(ranks)
        mine = array(world.rank())
        if group.contains(world.rank()):
            comm.all_reduce(mine, op, group=group)
        return mine, (group.size(), group.is_member)

    members = np.stack([array(rank) for rank in sorted(ranks)])
    numpy_op = {
        ReduceOp.SUM: members.sum(0),
        ReduceOp.PRODUCT: members.prod(0),
        ReduceOp.MIN: members.min(0),
        ReduceOp.MAX: members.max(0),
        ReduceOp.AVERAGE: members.mean(0),
    }[op]
    for rank, (mine, seen) in enumerate(world.run(work)):
        assert seen == (len(ranks), rank in ranks)
        np.testing.assert_allclose(mine, numpy_op if rank in ranks else array(rank), rtol=1e-15)


def test_async_calls_return_their_result_from_wait(world: Any) -> None:
    def work(world: World) -> Any:
        own = torch.full((3,), float(world.rank()))
        first = comm.all_reduce_sum(own, async_op=True)
        second = comm.all_gather(torch.tensor([world.rank()]), async_op=True)
        third = comm.reduce_scatter_mean(torch.arange(4.0) * world.rank(), async_op=True)
        fourth = comm.barrier(async_op=True)
        results = [third.wait(), second.wait(), first.wait(), fourth.wait()]
        return [None if item is None else item.tolist() for item in results], first.wait() is own, first.done()

    for rank, (results, same, done) in enumerate(world.run(work)):
        assert results == [[rank * 1.5], [0, 1, 2, 3], [6.0] * 3, None]
        assert same
        assert done


def test_numpy_arrays_change_in_place(world: Any) -> None:
    def work(world: World) -> Any:
        whole = np.zeros((3, 4), dtype=np.float32)
        part = whole[:, ::2]
        part += world.rank()
        same = comm.all_reduce_mean(part) is part
        return whole, same

    for whole, same in world.run(work):
        assert same
        np.testing.assert_array_equal(whole, np.tile([1.5, 0.0], (3, 2)))


def test_strided_groups_and_torch_groups(world: Any) -> None:
    def work(world: World) -> Any:
        import torch.distributed as dist

        even = world.new_group(range(0, N, 2))
        odd = world.new_group(range(1, N, 2))
        own = even if even.contains(world.rank()) else odd
        theirs = dist.new_group([1, 2])
        total = comm.all_reduce_sum(torch.tensor([world.rank()]), group=own).item()
        between = comm.all_reduce_sum(torch.tensor([1.0]), group=theirs).item() if world.rank() in (1, 2) else 0
        return own.ranks, own.rank(), own.size(), total, between, query.rank(own), query.world_size(own)

    assert world.run(work) == [
        ((0, 2), 0, 2, 2, 0, 0, 2),
        ((1, 3), 0, 2, 4, 2, 0, 2),
        ((0, 2), 1, 2, 2, 2, 1, 2),
        ((1, 3), 1, 2, 4, 0, 1, 2),
    ]


def test_world_properties(world: Any) -> None:
    def work(world: World) -> Any:
        world.barrier()
        return (
            world.rank(),
            world.world_size(),
            world.is_main_process(),
            world.default_group().ranks,
            str(world.backend),
        )

    kind = "gloo" if isinstance(world, RankWorld) else "mock"
    assert world.run(work) == [(rank, N, rank == 0, (0, 1, 2, 3), kind) for rank in range(N)]
