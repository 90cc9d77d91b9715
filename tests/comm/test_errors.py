"""Every misuse is a typed error with value, rule and fix, before anything is sent: the next call works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from axon_nb import comm
from axon_nb.comm import CallMismatch, CommError, InvalidRank, NotInGroup, TensorError, TensorMismatch, World
from axon_nb.errors import AxonError

Case = tuple[str, Callable[[World], Any], type[CommError], str]

CASES: list[Case] = [
    ("src", lambda w: comm.broadcast(torch.ones(1), src=4), InvalidRank, r"src=4: the group of ranks \[0, 1, 2, 3\]"),
    ("negative", lambda w: comm.gather_tensor(torch.ones(1), dst=-1), InvalidRank, "dst=-1"),
    ("self", lambda w: comm.send(torch.ones(1), w.rank()), InvalidRank, "that is this rank itself"),
    (
        "mean of ints",
        lambda w: comm.all_reduce_mean(torch.ones(1, dtype=torch.int64)),
        TensorError,
        r"use tensor.float\(\)",
    ),
    ("mean of truths", lambda w: comm.all_reduce_mean(torch.ones(1, dtype=torch.bool)), TensorError, "torch.bool"),
    (
        "complex order",
        lambda w: comm.all_reduce_max(torch.ones(1, dtype=torch.complex64)),
        TensorError,
        "have no order",
    ),
    ("fp8", lambda w: comm.all_reduce_sum(torch.ones(1).to(torch.float8_e5m2)), TensorError, "no backend reduces it"),
    ("sparse", lambda w: comm.all_reduce_sum(torch.eye(2).to_sparse()), TensorError, r"use to_dense\(\)"),
    ("list", lambda w: comm.all_reduce_sum([1, 2]), TensorError, "is a list: it must be a torch.Tensor"),
    ("read-only", lambda w: comm.all_reduce_sum(np.broadcast_to(np.ones(1), 3)), TensorError, "copy it first"),
    ("text", lambda w: comm.all_reduce_sum(np.array(["a"])), TensorError, "torch cannot share"),
    ("rows", lambda w: comm.reduce_scatter_sum(torch.ones(6)), TensorError, "dim 0 must be a multiple of 4"),
    ("no rows", lambda w: comm.reduce_scatter_sum(torch.tensor(1.0)), TensorError, "dim 0 must be a multiple of 4"),
    ("dim", lambda w: comm.all_gather(torch.ones(2), dim=1), TensorError, "the tensor has 1 dimensions"),
    ("no dim", lambda w: comm.all_gather(torch.ones(2), dim=None), TensorError, "with dim=None: the tensor has 1"),  # type: ignore[arg-type]
    (
        "uneven async",
        lambda w: comm.all_gather(torch.ones(1), uneven=True, async_op=True),
        TensorError,
        "leave async_op out",
    ),
    ("scatter async", lambda w: comm.scatter_tensor(torch.ones(4), async_op=True), TensorError, "needs `out`"),
    ("recv raw", lambda w: comm.recv((w.rank() + 1) % 4, header=False), TensorMismatch, "give `out=`"),
    ("empty group", lambda w: w.new_group([]), InvalidRank, "at least one rank"),
    ("no list", lambda w: w.new_group(2), InvalidRank, r"ranks: 2 is no list of ranks, such as \[0, 1\]"),  # type: ignore[arg-type]
    ("no gradient", lambda w: comm.sync_gradients(["a"]), TensorError, "gradients: 'a' is no tensor"),  # type: ignore[list-item]
    ("far group", lambda w: w.new_group([0, 9]), InvalidRank, "the world has ranks 0 to 3"),
    ("twice", lambda w: w.new_group([1, 1]), InvalidRank, "one is there twice"),
    ("named rank", lambda w: w.new_group(["0"]), InvalidRank, "'0' is no rank; ranks are whole numbers"),
    ("no rank", lambda w: comm.broadcast(torch.ones(1), src=None), InvalidRank, "src: None is no rank"),  # type: ignore[arg-type]
    ("op", lambda w: comm.all_reduce(torch.ones(1), "median"), CommError, r"op='median': it is one of ReduceOp\.SUM, "),  # type: ignore[arg-type]
    ("backend", lambda w: World.init("tcp"), CommError, "backend='tcp': it is one of 'gloo', 'nccl', 'mock'"),
    ("meta", lambda w: comm.all_reduce_sum(torch.ones(1, device="meta")), TensorError, "on meta, without data"),
    ("expanded", lambda w: comm.all_reduce_sum(torch.ones(1).expand(3)), TensorError, "share memory, and the result"),
    ("expanded to all", lambda w: comm.broadcast(torch.ones(1).expand(3)), TensorError, r"use tensor\.clone\(\)"),
    ("group of numbers", lambda w: comm.barrier(group=[0]), CommError, r"group=\[0\]: it is a ProcessGroup, a World"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "kind", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_misuse(world: Any, call: Callable[[World], Any], kind: type[CommError], text: str) -> None:
    def work(world: World) -> tuple[Any, float]:
        try:
            call(world)
        except AxonError as error:
            caught: Any = error
        else:
            caught = None
        return caught, comm.all_reduce_sum(torch.ones(1)).item()

    for error, after in world.run(work):
        assert type(error) is kind
        assert re.search(text, str(error)), str(error)
        assert after == 4.0


def test_who_is_no_member_is_told(world: Any) -> None:
    def work(world: World) -> str:
        group = world.new_group([1, 2])
        try:
            comm.all_reduce_sum(torch.ones(1), group=group)
        except NotInGroup as error:
            return str(error)
        return ""

    answers = world.run(work)
    assert answers[1] == answers[2] == ""
    assert answers[0].startswith("Rank 0 is no member of the group of ranks [1, 2]: guard the call")


def test_a_global_rank_is_recognised(world: Any) -> None:
    def work(world: World) -> str:
        group = world.new_group([2, 3])
        if world.rank() < 2:
            return ""
        with pytest.raises(InvalidRank) as caught:
            comm.broadcast(torch.ones(1), src=3, group=group)
        return str(caught.value)

    assert world.run(work)[3] == (
        "src=3: the group of ranks [2, 3] has ranks 0 to 1 (global rank 3 is number 1 there)."
    )


def test_an_out_that_does_not_fit_is_told_and_nothing_is_left_behind(world: Any) -> None:
    def work(world: World) -> Any:
        if world.rank() == 0:
            comm.send(torch.ones(3), 1)
            comm.send(torch.full((2,), 5.0), 1)
        if world.rank() == 1:
            with pytest.raises(
                TensorMismatch, match=r"it sends torch.float32 of shape \(3,\), `out` is .* shape \(2,\)"
            ):
                comm.recv(0, out=torch.empty(2))
            return comm.recv(0).tolist()
        return None

    assert world.run(work)[1] == [5.0, 5.0]


def test_checking_names_the_rank_that_differs(world: Any) -> None:
    def shapes(world: World) -> None:
        with comm.checking():
            comm.broadcast(torch.ones(2 if world.rank() == 3 else 1))

    with pytest.raises(TensorMismatch, match=r"rank 0 brings .* shape \(1,\), rank 3 torch.float32 of shape \(2,\)"):
        world.run(shapes)

    def calls(world: World) -> None:
        with comm.checking():
            comm.all_reduce_max(torch.ones(1)) if world.rank() == 2 else comm.all_reduce_sum(torch.ones(1))

    with pytest.raises(CallMismatch, match=r"rank 0 calls all_reduce \(sum\) while rank 2 calls all_reduce \(max\)"):
        world.run(calls)

    def right(world: World) -> float:
        with comm.checking():
            return float(comm.all_reduce_sum(torch.ones(1)).item())

    assert world.run(right) == [4.0] * 4


def test_operations_by_torchs_names(world: Any) -> None:
    """What a reader of torch's documentation passes."""

    def work(world: World) -> list[float]:
        ops: list[Any] = [dist.ReduceOp.MAX, "max", "Sum", dist.ReduceOp.AVG, "mean", dist.ReduceOp.PRODUCT]
        own = float(world.rank() + 1)
        return [comm.all_reduce(torch.tensor(own), op).item() for op in ops]

    assert world.run(work) == [[4.0, 4.0, 10.0, 2.5, 2.5, 24.0]] * 4
