"""Every collective matches NumPy, for shapes, dtypes and groups chosen by hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axon_nb import comm
from axon_nb.comm import ReduceOp, World

pytestmark = pytest.mark.timeout(600)

N = 4
DTYPES = [np.float32, np.float64, np.float16, np.int8, np.int16, np.int32, np.int64, np.uint8, np.bool_, np.complex64]
NUMPYS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.AVERAGE: np.add,
}


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
    dtype=st.sampled_from(DTYPES),
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
