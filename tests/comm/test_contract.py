"""Every backend matches NumPy: one suite for the mock world and for real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axon_nb import comm
from axon_nb.comm import CollectiveMismatchError, ReduceOp, TensorError, TensorMismatchError, World
from axon_nb.comm import world as query
from tests.support.cases.pairwise import pairwise
from tests.support.ranks import RankWorld

pytestmark = pytest.mark.timeout(600)

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

SPLITS = [[1, 0, 3, 2], [0, 0, 0, 0], [2, 2, 0, 1], [0, 4, 1, 0]]
"""Rows that each rank sends to each rank; rank 1 sends none."""

NUMPY_DTYPES = [
    np.float32,
    np.float64,
    np.float16,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.bool_,
    np.complex64,
]
NUMPYS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.AVERAGE: np.add,
}


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


def rows(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The rows of a rank: two numbers that name the sender and the row, times 7."""
    count = sum(SPLITS[rank])
    return (torch.arange(2 * count).view(count, 2) + 7 * rank).to(dtype)


def expected(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What a rank receives."""
    return torch.cat([rows(source, dtype).split(SPLITS[source])[rank] for source in range(N)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64], ids=str)
def test_rows_arrive_and_return(world: Any, dtype: torch.dtype) -> None:
    def work(world: World) -> Any:
        sizes = SPLITS[world.rank()]
        taken = comm.all_to_all(torch.tensor(sizes)).tolist()
        got = comm.all_to_all(rows(world.rank(), dtype), send_sizes=sizes)
        same = comm.all_to_all(rows(world.rank(), dtype), send_sizes=sizes, recv_sizes=taken)
        return got, same, comm.all_to_all(got, send_sizes=taken, recv_sizes=sizes)

    for rank, (got, same, returned) in enumerate(world.run(work)):
        assert torch.equal(got, expected(rank, dtype))
        assert torch.equal(same, got)
        assert torch.equal(returned, rows(rank, dtype))


def test_gradients_flow_back_the_way_the_rows_came(world: Any) -> None:
    def work(world: World) -> Any:
        source = rows(world.rank()).requires_grad_()
        got = comm.all_to_all(source, send_sizes=SPLITS[world.rank()])
        (got * (10 + world.rank())).sum().backward()
        return source.grad

    for rank, gradient in enumerate(world.run(work)):
        receivers = torch.arange(N).repeat_interleave(torch.tensor(SPLITS[rank]))
        assert torch.equal(gradient, (10.0 + receivers.double())[:, None].expand(-1, 2))


@pytest.mark.parametrize("backend", ["mock", "shm", "gloo"])
def test_first_and_second_gradients_equal_finite_differences(backend: str) -> None:
    def work(world: World) -> bool:
        sizes = [[2, 1], [0, 3]][query.rank()]
        inputs = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

        def loss(values: torch.Tensor) -> torch.Tensor:
            # A sum over ranks, so that finite differences on one rank see what others compute with its rows.
            swapped = comm.all_to_all(values, send_sizes=sizes)
            cubes = (swapped**3) * (1 + query.rank())
            return comm.all_to_all(cubes, send_sizes=comm.all_to_all(torch.tensor(sizes)).tolist())

        return torch.autograd.gradcheck(loss, [inputs]) and torch.autograd.gradgradcheck(
            loss, [inputs], torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
        )

    if backend == "mock":
        assert all(World.mock(2).run(work))
    else:
        with RankWorld(2, backend=backend) as ranks:
            assert all(ranks.run(work))


def test_equal_parts_empty_tensors_and_arrays() -> None:
    def work(world: World) -> Any:
        rank = world.rank()
        even = comm.all_to_all(torch.arange(8) + 10 * rank)
        empty = comm.all_to_all(torch.empty(0, 3, dtype=torch.int16))
        thin = comm.all_to_all(torch.empty(4, 0, dtype=torch.bool))
        array = comm.all_to_all(np.arange(4) + 10 * rank)
        return even.tolist(), empty.shape, thin.shape, array.tolist(), type(array) is np.ndarray

    for rank, result in enumerate(World.mock(N).run(work)):
        even = [10 * source + 2 * rank + i for source in range(N) for i in range(2)]
        assert result == (even, (0, 3), (4, 0), [10 * source + rank for source in range(N)], True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "5 rows cannot be divided evenly among 4 ranks; pass send_sizes"),
        ({"send_sizes": [1, 1, 1, 1]}, r"send_sizes must add up to the 5 rows of the tensor; got \[1, 1, 1, 1\]"),
        ({"send_sizes": [5, 0]}, "send_sizes must be 4 numbers of rows, one per rank, from 0"),
        ({"send_sizes": [6, -1, 0, 0]}, "send_sizes must be 4 numbers"),
        ({"send_sizes": [5.0, 0, 0, 0]}, "send_sizes must be 4 numbers"),
        ({"send_sizes": [5, 0, 0, 0], "recv_sizes": [1]}, "recv_sizes must be 4 numbers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        World.mock(N).run(lambda world: comm.all_to_all(torch.zeros(5), **arguments))
    with pytest.raises(TensorError, match="needs at least one dimension"):
        World.mock(N).run(lambda world: comm.all_to_all(torch.tensor(1.0)))


def test_sizes_that_contradict_each_other_are_reported(world: Any) -> None:
    if world.__class__.__name__ == "RankWorld" and world.backend == "gloo":
        pytest.skip("Gloo itself does not compare sizes; in cells axon_nb does")

    def work(world: World) -> None:
        received = [1, 1, 1, 2] if world.rank() == 2 else [1, 1, 1, 1]
        comm.all_to_all(torch.zeros(4), send_sizes=[1, 1, 1, 1], recv_sizes=received)

    with pytest.raises(Exception, match=r"does not fit|split sizes must match") as caught:
        world.run(work)
    assert isinstance(caught.value, TensorMismatchError) or "TensorMismatchError" in str(caught.value)


def test_checking_compares_the_calls() -> None:
    def work(world: World) -> None:
        with comm.checking():
            comm.barrier() if world.rank() == 1 else comm.all_to_all(torch.zeros(4))

    with pytest.raises(CollectiveMismatchError, match="rank 0 called all_to_all, rank 1 called barrier"):
        World.mock(N).run(work)


def array(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Small integers, so that every order of reduction gives the same bits."""
    whole = (np.arange(int(np.prod(shape))) * 5 + rank * 3) % 3
    return np.asarray(whole.reshape(shape).astype(dtype))


def ops_for(dtype: Any) -> list[ReduceOp]:
    """Return the operations that are defined for this dtype."""
    kind = np.dtype(dtype).kind
    wanted = {"c": (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVERAGE), "f": tuple(ReduceOp)}
    return list(wanted.get(kind, (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)))


def combine(parts: list[np.ndarray[Any, Any]], op: ReduceOp) -> np.ndarray[Any, Any]:
    """Return the result computed by NumPy."""
    total = parts[0]
    for part in parts[1:]:
        total = NUMPYS[op](total, part)
    return (total / len(parts)).astype(total.dtype) if op is ReduceOp.AVERAGE else total


@given(
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(NUMPY_DTYPES),
    ranks=st.sets(st.integers(0, N - 1), min_size=1),
    data=st.data(),
)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_collectives_match_numpy(
    world: Any, shape: tuple[int, ...], dtype: Any, ranks: set[int], data: st.DataObject
) -> None:
    members = sorted(ranks)
    size = len(members)
    op = data.draw(st.sampled_from(ops_for(dtype)))
    root = data.draw(st.integers(0, size - 1))
    rows, *rest = shape
    whole = (rows * size, *rest)

    def work(world: World) -> Any:
        group = world.new_group(members)
        if not group.is_member:
            return None
        own, large = (array(world.rank(), form, dtype) for form in (shape, whole))
        tensor = torch.from_numpy(own.copy())  # an array is changed in place; a tensor takes the fast path
        return {
            "all_reduce": (comm.all_reduce(own.copy(), op, group=group), comm.all_reduce(tensor, op, group=group)),
            "broadcast": comm.broadcast(own.copy(), src=root, group=group),
            "all_gather": comm.all_gather(own, group=group),
            "reduce_scatter": comm.reduce_scatter(large, op, group=group),
            "gather": comm.gather_tensor(own, dst=root, group=group),
            "scatter": comm.scatter_tensor(large, src=root, group=group),
        }

    small = [array(rank, shape, dtype) for rank in members]
    large = [array(rank, whole, dtype) for rank in members]
    for rank, answer in enumerate(world.run(work)):
        if rank not in ranks:
            assert answer is None
            continue
        place = members.index(rank)
        mine = slice(place * rows, (place + 1) * rows)
        for result in answer["all_reduce"]:
            np.testing.assert_array_equal(np.asarray(result), combine(small, op))
        np.testing.assert_array_equal(answer["broadcast"], small[root])
        np.testing.assert_array_equal(answer["all_gather"], np.concatenate(small))
        np.testing.assert_array_equal(answer["reduce_scatter"], combine(large, op)[mine])
        np.testing.assert_array_equal(answer["scatter"], large[root][mine])
        if place == root:
            np.testing.assert_array_equal(answer["gather"], np.concatenate(small))
        else:
            assert answer["gather"] is None
