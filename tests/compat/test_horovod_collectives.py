"""Horovod's collectives: documented values, gradients, joined ranks and errors, in a mock world and on processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from axon_nb.comm import World
from axon_nb.compat import horovod as hvd
from axon_nb.compat.horovod.collectives import as_op

Call = Callable[[int], Any]

VALUES: dict[str, tuple[Call, Call]] = {
    "size and ranks": (
        lambda r: (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.is_initialized()),
        lambda r: (r, 3, r, 3, True),
    ),
    "average": (lambda r: hvd.allreduce(torch.tensor([r, 3.0 * r])).tolist(), lambda r: [1.0, 3.0]),
    "sum": (lambda r: hvd.allreduce(torch.tensor([r + 1.0]), name="total", op=hvd.Sum).tolist(), lambda r: [6.0]),
    "scalar": (lambda r: hvd.allreduce(torch.tensor(float(r))).item(), lambda r: 1.0),
    "integers are truncated": (lambda r: hvd.allreduce(torch.tensor([-r * r, r * r])).tolist(), lambda r: [-1, 1]),
    "fp16": (
        lambda r: hvd.allreduce(torch.full((2,), 1 / 3), compression=hvd.Compression.fp16, op=hvd.Sum).tolist(),
        lambda r: [torch.tensor(1 / 3).half().mul(3).item()] * 2,
    ),
    "view": (lambda r: hvd.allreduce(torch.arange(6.0).view(2, 3).t() * r, op=hvd.Sum)[2, 1].item(), lambda r: 15.0),
    "rows": (
        lambda r: hvd.allgather(torch.full((r + 1, 2), r)).tolist(),
        lambda r: [[n, n] for n in range(3) for _ in range(n + 1)],
    ),
    "equal parts": (
        lambda r: hvd.alltoall(torch.arange(6) + 100 * r).tolist(),
        lambda r: [100 * n + 2 * r + i for n in range(3) for i in range(2)],
    ),
    "splits": (
        lambda r: [part.tolist() for part in hvd.alltoall(torch.full((r + 2,), r), torch.tensor([r + 1, 0, 1]))],
        lambda r: [[[0, 1, 1, 2, 2, 2], [], [0, 1, 2]][r], [[1, 2, 3], [0, 0, 0], [1, 1, 1]][r]],
    ),
    "broadcast": (lambda r: hvd.broadcast(torch.tensor([r]), 2, name="epoch").item(), lambda r: 2),
    "object": (lambda r: hvd.broadcast_object({"rank": r}, root_rank=1), lambda r: {"rank": 1}),
}


def test_older_parameter_warns() -> None:
    with pytest.warns(DeprecationWarning, match="replaced with `op`"):
        assert as_op(None, average=False) is hvd.Sum


@pytest.mark.parametrize("what", VALUES)
def test_values(world: Any, what: str) -> None:
    call, expected = VALUES[what]

    def work(world: World) -> Any:
        hvd.init()
        return call(world.rank())

    assert world.run(work) == [expected(rank) for rank in range(3)]


@pytest.mark.parametrize(("op", "gradient"), [(hvd.Average, 2.0), (hvd.Sum, 6.0)])
def test_allreduce_has_a_gradient_and_keeps_its_input(world: Any, op: int, gradient: float) -> None:
    def work(world: World) -> Any:
        hvd.init()
        value = torch.full((2,), float(world.rank()), requires_grad=True)
        (hvd.allreduce(value, op=op) * (world.rank() + 1)).sum().backward()
        return value.tolist(), value.grad.tolist()  # type: ignore[union-attr]

    assert world.run(work) == [([float(rank)] * 2, [gradient] * 2) for rank in range(3)]


def test_joined_ranks_count_as_zeros(world: Any) -> None:
    """Rank r has r batches; each gets the average over all ranks, and who joined last."""

    def work(world: World) -> Any:
        hvd.init()
        averages = [hvd.allreduce(torch.ones(1), name=f"batch {number}").item() for number in range(world.rank())]
        return averages, hvd.join(), hvd.join()

    third = pytest.approx(1 / 3)
    assert world.run(work) == [([], 2, 2), ([pytest.approx(2 / 3)], 2, 2), ([pytest.approx(2 / 3), third], 2, 2)]


BETWEEN_RANKS: dict[str, tuple[Call, str]] = {
    "shapes": (
        lambda r: hvd.allreduce(torch.ones(3 + r), name="grad"),
        r"hvd.allreduce 'grad': rank 0 passed Average of torch.float32 of shape \(3,\), rank 1 .*shape \(4,\)",
    ),
    "as many elements": (lambda r: hvd.allreduce(torch.ones((6,) if r else (2, 3))), r"shape \(2, 3\), rank 1 passed "),
    "dtypes": (lambda r: hvd.allreduce(torch.ones(2, dtype=torch.float64 if r else None)), "rank 1 passed .*float64"),
    "operations": (lambda r: hvd.allreduce(torch.ones(2), op=hvd.Sum if r else hvd.Average), "rank 1 passed Sum"),
    "names": (
        lambda r: hvd.allreduce(torch.ones(2), name=f"by {min(r, 1)}"),
        "rank 0 called hvd.allreduce 'by 0', rank 1 called hvd.allreduce 'by 1'. Make the same calls in the same order",
    ),
    "roots": (lambda r: hvd.broadcast(torch.ones(2), r), "with root rank 0, rank 1 passed .* with root rank 1"),
    "columns": (lambda r: hvd.allgather(torch.ones(2, 2 + r)), r"shape \(any, 2\), rank 1 passed .*\(any, 3\)"),
    "columns of alltoall": (lambda r: hvd.alltoall(torch.ones(3, 2 + r)), r"shape \(any, 2\), rank 1 passed "),
    "parameters": (
        lambda r: hvd.broadcast_parameters({"a": torch.ones(1), "b": torch.ones(1 + r)}, 0),
        r"hvd.broadcast_parameters: rank 0 passed b: torch.float32 of shape \(1,\).*, rank 1 passed b: .*shape \(2,\)",
    ),
    "collectives": (
        lambda r: hvd.allreduce(torch.ones(2)) if r else hvd.broadcast_object(1),
        "rank 0 called hvd.broadcast_object, rank 1 called hvd.allreduce",
    ),
    "a joined rank": (
        lambda r: hvd.join() if r == 2 else hvd.allgather(torch.ones(2)),
        r"hvd.allgather: rank 2 called hvd.join\(\), and only hvd.allreduce works then",
    ),
}


@pytest.mark.parametrize("what", BETWEEN_RANKS)
def test_every_rank_gets_an_error_if_calls_differ(world: Any, what: str) -> None:
    call, pattern = BETWEEN_RANKS[what]

    def work(world: World) -> Any:
        hvd.init()
        problem: Any = None
        try:
            call(world.rank())
        except hvd.HorovodInternalError as error:
            problem = str(error)
        if what == "a joined rank" and world.rank() < 2:
            hvd.join()
        return problem, hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item()

    for rank, (problem, total) in enumerate(world.run(work)):
        assert total == 3.0
        if what == "a joined rank" and rank == 2:
            assert problem is None
        else:
            assert problem is not None
            assert re.search(pattern, problem), problem


ALONE: dict[str, tuple[Call, type[Exception], str]] = {
    "a list": (lambda r: hvd.allreduce([1.0]), ValueError, "needs a torch.Tensor"),  # type: ignore[arg-type]
    "sparse": (lambda r: hvd.allreduce(torch.eye(2).to_sparse()), ValueError, r"pass tensor.to_dense\(\)"),
    "booleans": (lambda r: hvd.allreduce(torch.ones(2).bool()), ValueError, "cannot average booleans"),
    "both": (lambda r: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), ValueError, "supersedes average"),
    "no op": (lambda r: hvd.allreduce(torch.ones(2), op=17), ValueError, "op must be .* got 17"),
    "scalar rows": (lambda r: hvd.allgather(torch.tensor(1.0)), ValueError, r"use tensor.reshape\(1\)"),
    "gradient": (lambda r: hvd.allgather(torch.ones(1, requires_grad=True)), NotImplementedError, "no gradient here"),
    "uneven": (lambda r: hvd.alltoall(torch.ones(4)), ValueError, "4 rows without splits"),
    "splits": (lambda r: hvd.alltoall(torch.ones(2), [1, 1, 1]), ValueError, "splits must be 3 integers"),
    "float splits": (lambda r: hvd.alltoall(torch.ones(3), torch.ones(3)), ValueError, "splits must be 3 integers"),
    "root": (lambda r: hvd.broadcast(torch.ones(2), 3), ValueError, "root_rank=3: must be from 0 to 2"),
    "parameters": (lambda r: hvd.broadcast_parameters(5, 0), ValueError, "invalid params of type"),  # type: ignore[arg-type]
    "no tensor": (lambda r: hvd.broadcast_parameters({"a": 1}, 0), ValueError, "a is not a tensor"),
    "predivide": (
        lambda r: hvd.DistributedOptimizer(optimizer(), op=hvd.Sum, gradient_predivide_factor=2.0),
        ValueError,
        "not supported with op != Average",
    ),
    "passes": (lambda r: hvd.DistributedOptimizer(optimizer(), backward_passes_per_step=0), ValueError, "must be > 0"),
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)


def test_bad_input_raises_before_communication(world: Any) -> None:
    def work(world: World) -> list[Any]:
        hvd.init()
        problems = []
        for call, kind, pattern in ALONE.values():
            try:
                problems.append(f"gave {call(world.rank())}")
            except Exception as error:
                fits = isinstance(error, kind) and re.search(pattern, str(error))
                problems.append(None if fits else f"{type(error).__name__}: {error}")
            assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item() == 3.0
        return problems

    for problems in world.run(work):
        assert {name: problem for name, problem in zip(ALONE, problems, strict=True) if problem} == {}


def test_calls_before_init_raise(world: Any) -> None:
    calls: list[Callable[[], Any]] = [
        hvd.size,
        hvd.local_rank,
        hvd.join,
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.DistributedOptimizer(optimizer()),
    ]

    def work(world: World) -> Any:
        hvd.shutdown()
        for call in calls:
            with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)\."):
                call()
        return hvd.is_initialized()

    assert world.run(work) == [False] * 3


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("Adasum", "hvd.Average"),
        ("ProcessSet", "torch.distributed.new_group"),
        ("SyncBatchNorm", "axon_nb.parallel.SyncBatchNorm"),
        ("allreduce_async_", "torch.distributed.all_reduce"),
        ("elastic", "%distributed repair"),
        ("grouped_allgather_async", "torch.distributed.all_gather"),
        ("grouped_reducescatter", "torch.distributed.reduce_scatter_tensor"),
        ("nccl_built", "torch.distributed.get_backend"),
        ("sparse_allreduce_async", "to_dense"),
        ("synchronize", "torch.distributed.all_reduce"),
    ],
)
def test_unsupported_names_suggest_torch_calls(name: str, instead: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"hvd\.{name} is not offered here: use .*{instead}"):
        getattr(hvd, name)
    with pytest.raises(AttributeError, match="has no attribute 'allreduc'"):
        hvd.allreduc  # noqa: B018
