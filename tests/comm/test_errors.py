"""Every misuse raises a typed error with value, rule and fix before anything is sent; so do wrong placements."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spmd_types
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from axon_nb import comm
from axon_nb.comm import (
    CollectiveMismatchError,
    CommError,
    InvalidArgumentError,
    InvalidRankError,
    NotInGroupError,
    TensorError,
    TensorMismatchError,
    World,
)
from axon_nb.comm.placements import declare_placements, placed
from axon_nb.errors import AxonError, UsageError
from axon_nb.parallel import Checkpoints, clip_grad_norm, make_mesh
from tests.support.ranks import RankWorld

Case = tuple[str, Callable[[World], Any], type[CommError], str]

CASES: list[Case] = [
    (
        "src",
        lambda w: comm.broadcast(torch.ones(1), src=4),
        InvalidRankError,
        r"src must be 0 to 3 in the group of ranks \[0, 1, 2, 3\]; got 4",
    ),
    (
        "negative",
        lambda w: comm.gather_tensor(torch.ones(1), dst=-1),
        InvalidRankError,
        "dst must be 0 to 3 .*; got -1",
    ),
    ("self", lambda w: comm.send(torch.ones(1), w.rank()), InvalidRankError, "a rank cannot send to itself"),
    (
        "mean of ints",
        lambda w: comm.all_reduce_mean(torch.ones(1, dtype=torch.int64)),
        TensorError,
        r"use tensor.float\(\)",
    ),
    ("mean of booleans", lambda w: comm.all_reduce_mean(torch.ones(1, dtype=torch.bool)), TensorError, "torch.bool"),
    (
        "complex order",
        lambda w: comm.all_reduce_max(torch.ones(1, dtype=torch.complex64)),
        TensorError,
        "have no order",
    ),
    (
        "fp8",
        lambda w: comm.all_reduce_sum(torch.ones(1).to(torch.float8_e5m2)),
        TensorError,
        "no backend reduces torch.float8",
    ),
    ("sparse", lambda w: comm.all_reduce_sum(torch.eye(2).to_sparse()), TensorError, r"use to_dense\(\)"),
    ("list", lambda w: comm.all_reduce_sum([1, 2]), TensorError, "tensor must be a torch.Tensor, .*; got list"),
    (
        "read-only",
        lambda w: comm.all_reduce_sum(np.broadcast_to(np.ones(1), 3)),
        TensorError,
        "read-only .* pass a copy",
    ),
    ("text", lambda w: comm.all_reduce_sum(np.array(["a"])), TensorError, "torch cannot share"),
    (
        "rows",
        lambda w: comm.reduce_scatter_sum(torch.ones(6)),
        TensorError,
        r"dim 0 must be divisible by the group size \(4\)",
    ),
    (
        "no rows",
        lambda w: comm.reduce_scatter_sum(torch.tensor(1.0)),
        TensorError,
        r"dim 0 must be divisible by the group size \(4\)",
    ),
    ("dim", lambda w: comm.all_gather(torch.ones(2), dim=1), TensorError, "all_gather: dim must be -1 to 0; got 1"),
    (
        "no dim",
        lambda w: comm.all_gather(torch.ones(2), dim=None),
        TensorError,
        "all_gather: dim must be -1 to 0; got None",
    ),  # type: ignore[arg-type]
    (
        "uneven async",
        lambda w: comm.all_gather(torch.ones(1), uneven=True, async_op=True),
        TensorError,
        "cannot be combined with async_op",
    ),
    ("scatter async", lambda w: comm.scatter_tensor(torch.ones(4), async_op=True), TensorError, "needs `out`"),
    ("recv raw", lambda w: comm.recv((w.rank() + 1) % 4, header=False), TensorMismatchError, "needs `out=`"),
    ("empty group", lambda w: w.new_group([]), InvalidRankError, "must name at least one rank"),
    ("no list", lambda w: w.new_group(2), InvalidRankError, r"must be a list of ranks, such as \[0, 1\]; got 2"),  # type: ignore[arg-type]
    ("no gradient", lambda w: comm.sync_gradients(["a"]), TensorError, "must be tensors or parameters; got 'a'"),  # type: ignore[list-item]
    ("far group", lambda w: w.new_group([0, 9]), InvalidRankError, "ranks must be 0 to 3; got 9"),
    ("twice", lambda w: w.new_group([1, 1]), InvalidRankError, r"Duplicate rank in \[1, 1\]"),
    ("named rank", lambda w: w.new_group(["0"]), InvalidRankError, "must be an integer from 0; got '0'"),
    (
        "no rank",
        lambda w: comm.broadcast(torch.ones(1), src=None),
        InvalidRankError,
        "integer from 0; got None",
    ),  # type: ignore[arg-type]
    (
        "op",
        lambda w: comm.all_reduce(torch.ones(1), "median"),
        InvalidArgumentError,
        "got 'median'",
    ),  # type: ignore[arg-type]
    ("backend", lambda w: World.init("tcp"), InvalidArgumentError, "one of 'gloo', 'nccl', 'mock'; got 'tcp'"),
    ("meta", lambda w: comm.all_reduce_sum(torch.ones(1, device="meta")), TensorError, "on the meta device"),
    ("expanded", lambda w: comm.all_reduce_sum(torch.ones(1).expand(3)), TensorError, "share memory, and the result"),
    ("expanded to all", lambda w: comm.broadcast(torch.ones(1).expand(3)), TensorError, r"use tensor\.clone\(\)"),
    (
        "group of numbers",
        lambda w: comm.barrier(group=[0]),
        InvalidArgumentError,
        r"must be a ProcessGroup, .*; got \[0\]",
    ),  # type: ignore[arg-type]
]

types: Any = spmd_types
"""As it exports its names in a way that type checkers do not follow."""


@pytest.mark.parametrize(("call", "kind", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_invalid_arguments_raise(world: Any, call: Callable[[World], Any], kind: type[CommError], text: str) -> None:
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


def test_non_members_raise(world: Any) -> None:
    def work(world: World) -> str:
        group = world.new_group([1, 2])
        try:
            comm.all_reduce_sum(torch.ones(1), group=group)
        except NotInGroupError as error:
            return str(error)
        return ""

    answers = world.run(work)
    assert answers[1] == answers[2] == ""
    assert answers[0].startswith("Rank 0 is not a member of the group of ranks [1, 2]: guard the call")


def test_global_rank_is_recognised(world: Any) -> None:
    def work(world: World) -> str:
        group = world.new_group([2, 3])
        if world.rank() < 2:
            return ""
        with pytest.raises(InvalidRankError) as caught:
            comm.broadcast(torch.ones(1), src=3, group=group)
        return str(caught.value)

    assert world.run(work)[3] == (
        "src must be 0 to 1 in the group of ranks [2, 3]; got 3 (global rank 3 is rank 1 there)."
    )


def test_recv_into_a_mismatched_out_raises_and_drops_the_message(world: Any) -> None:
    def work(world: World) -> Any:
        if world.rank() == 0:
            comm.send(torch.ones(3), 1)
            comm.send(torch.full((2,), 5.0), 1)
        if world.rank() == 1:
            with pytest.raises(
                TensorMismatchError, match=r"rank 0 sent torch.float32 of shape \(3,\), but `out` is .* shape \(2,\)"
            ):
                comm.recv(0, out=torch.empty(2))
            return comm.recv(0).tolist()
        return None

    assert world.run(work)[1] == [5.0, 5.0]


def test_checking_names_the_mismatched_rank(world: Any) -> None:
    def shapes(world: World) -> None:
        with comm.checking():
            comm.broadcast(torch.ones(2 if world.rank() == 3 else 1))

    with pytest.raises(
        TensorMismatchError, match=r"rank 0 passed .* shape \(1,\), rank 3 passed torch.float32 of shape \(2,\)"
    ):
        world.run(shapes)

    def calls(world: World) -> None:
        with comm.checking():
            comm.all_reduce_max(torch.ones(1)) if world.rank() == 2 else comm.all_reduce_sum(torch.ones(1))

    with pytest.raises(
        CollectiveMismatchError, match=r"rank 0 called all_reduce \(sum\), rank 2 called all_reduce \(max\)"
    ):
        world.run(calls)

    def right(world: World) -> float:
        with comm.checking():
            return float(comm.all_reduce_sum(torch.ones(1)).item())

    assert world.run(right) == [4.0] * 4


def test_torch_operations_and_names_are_accepted(world: Any) -> None:
    """Operations can be passed as torch's documentation spells them."""

    def work(world: World) -> list[float]:
        ops: list[Any] = [dist.ReduceOp.MAX, "max", "Sum", dist.ReduceOp.AVG, "mean", dist.ReduceOp.PRODUCT]
        own = float(world.rank() + 1)
        return [comm.all_reduce(torch.tensor(own), op).item() for op in ops]

    assert world.run(work) == [[4.0, 4.0, 10.0, 2.5, 2.5, 24.0]] * 4


def _refusal(*arguments: Any, **keywords: Any) -> str:
    with pytest.raises(UsageError) as error:
        declare_placements(*arguments, **keywords)
    return str(error.value)


def test_declaration_that_does_not_fit_is_refused() -> None:
    def refusals(world: World) -> list[str]:
        mesh, tensor = make_mesh(dp=2, tp=2, device="cpu"), torch.zeros(4, 3)
        whole = DTensor.from_local(tensor, mesh["tp"], [Shard(0)], run_check=False)
        return [
            _refusal(tensor, mesh, [Shard(0)]),
            _refusal(tensor, mesh["tp"], [Shard(2)]),
            _refusal(tensor, mesh["tp"], [Partial()]),
            _refusal(torch.zeros(5, 3), mesh["tp"], [Shard(0)], shape=(8, 3)),
            _refusal(whole, mesh["tp"], [Shard(0)]),
        ]

    count, dim, partial, shape, dtensor = World.mock(4).run(refusals)[1]
    assert count == "placements must have one entry for each of the 2 axes of the mesh; got (Shard(dim=0),)."
    assert dim == (
        "placements must be Replicate(), or Shard(dim) with a dimension of the tensor, which has 2; got Shard(dim=2)."
    )
    assert partial.endswith("got Partial(sum).")
    assert shape == (
        "shape (8, 3) with (Shard(dim=0),) gives this rank a part of shape (4, 3), but the tensor has (5, 3)."
    )
    assert dtensor == "tensor is a DTensor, which has its own placements; declare those of plain tensors only."


def test_declaration_belongs_to_one_tensor_and_ends_with_it() -> None:
    def look(world: World) -> tuple[Any, ...]:
        mesh = make_mesh(dp=2, tp=2, device="cpu")
        tensor = declare_placements(torch.zeros(4, 3), mesh, [Replicate(), Shard(-1)])
        found = placed(tensor)
        assert found is not None
        other = copy.deepcopy(tensor)
        alive = weakref.ref(tensor)
        result = (found.shape, found.placements == (Replicate(), Shard(1)), found.is_replicated, placed(other))
        del tensor, found
        gc.collect()
        return *result, alive()

    assert World.mock(4).run(look) == [((4, 6), True, False, None, None)] * 4


def test_types_of_plain_tensors_are_read() -> None:
    def look(world: World) -> list[Any]:
        mesh = make_mesh(dp=2, tp=2, device="cpu")
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        spec = types.PartitionSpec
        typed = []
        for kinds, where in [
            ({dp: types.R, tp: types.V}, spec(None, tp)),
            ({dp: types.V, tp: types.V}, spec((dp, tp), None)),
            ({dp: types.I, tp: types.P}, None),
            ({dp: types.V, tp: types.V}, spec((tp, dp), None)),  # no placements say this
            ({dp: types.R, tp: types.V}, None),  # of what, nobody knows
            ({tp: types.S(0)}, None),
        ]:
            typed.append(types.assert_type(torch.zeros(4, 3), kinds, *([] if where is None else [where])))
        found = [placed(tensor) for tensor in (*typed, torch.zeros(4, 3))]
        own = [None if one is None else (one.shape, one.placements, one.mesh.mesh.tolist()) for one in found]
        assert found[0] is not None
        assert found[0].mesh.get_group(1) is tp
        return own

    over_both = [[0, 1], [2, 3]]
    for rank, found in enumerate(World.mock(4).run(look)):
        tp = over_both[rank // 2]
        assert found == [
            ((4, 6), (Replicate(), Shard(1)), over_both),
            ((16, 3), (Shard(0), Shard(0)), over_both),
            ((4, 3), (Replicate(), Partial()), over_both),
            None,
            None,
            ((8, 3), (Shard(0),), tp),
            None,
        ]


def test_a_model_of_typed_parts_is_clipped_and_saved_as_a_whole(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(8, 3)

    def model(world: World) -> torch.nn.Module:
        mesh = make_mesh(tp=world.world_size(), device="cpu")
        layer = torch.nn.Linear(3, 8 // world.world_size(), bias=False)
        layer.weight.data = whole.chunk(world.world_size())[world.rank()].clone()
        types.assert_type(layer.weight, {mesh.get_group("tp"): types.S(0)})
        return layer

    def save(world: World) -> float:
        layer = model(world)
        layer.weight.grad = layer.weight.detach().clone()
        Checkpoints(tmp_path).save(1, model=layer)
        return clip_grad_norm(layer, 1e9)

    def load(world: World) -> Any:
        layer = model(world)
        layer.weight.data.zero_()
        Checkpoints(tmp_path).load_latest(model=layer)
        return layer.weight.detach()

    with RankWorld(4) as four:
        assert four.run(save) == [pytest.approx(float(whole.norm()))] * 4
    with RankWorld(2) as two:
        assert torch.equal(torch.cat(two.run(load)), whole)
