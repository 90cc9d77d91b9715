"""What cannot be is a sentence on every rank that it concerns, at once, and the next call works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from axon_nb.comm import World
from axon_nb.compat import horovod as hvd

Call = Callable[[int], Any]

BETWEEN_RANKS: dict[str, tuple[Call, str]] = {
    "shapes": (
        lambda r: hvd.allreduce(torch.ones(3 + r), name="grad"),
        r"hvd.allreduce 'grad': rank 0 passed Average of torch.float32 of shape \(3,\), rank 1 .*shape \(4,\)",
    ),
    "as many elements": (lambda r: hvd.allreduce(torch.ones((6,) if r else (2, 3))), r"shape \(2, 3\), rank 1 passed "),
    "dtypes": (lambda r: hvd.allreduce(torch.ones(2, dtype=torch.float64 if r else None)), "rank 1 passed .*float64"),
    "operations": (lambda r: hvd.allreduce(torch.ones(2), op=hvd.Max if r else hvd.Min), "rank 1 passed Max"),
    "factors": (lambda r: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + r), "prescale_factor=2"),
    "roots": (lambda r: hvd.broadcast(torch.ones(2), r), "with root rank 0, rank 1 passed .* with root rank 1"),
    "columns": (lambda r: hvd.allgather(torch.ones(2, 2 + r)), r"shape \(any, 2\), rank 1 passed .*\(any, 3\)"),
    "columns of alltoall": (lambda r: hvd.alltoall(torch.ones(3, 2 + r)), r"shape \(any, 2\), rank 1 passed "),
    "rows": (lambda r: hvd.reducescatter(torch.ones(3 + r)), r"shape \(3,\), rank 1 passed "),
    "a group": (lambda r: hvd.grouped_allreduce([torch.ones(2)] * (1 + r)), "rank 1 passed "),
    "sets": (lambda r: hvd.add_process_set([0, 1 + (r > 0)]), r"passed ranks \[0, 1\], rank 1 passed ranks \[0, 2\]"),
    "names": (
        lambda r: hvd.allreduce(torch.ones(2), name=f"by {r}"),
        "Deadlock: rank 0 waits in hvd.allreduce 'by 0', which ranks 1-2 did not call; rank 1 waits",
    ),
    "collectives": (
        lambda r: hvd.allreduce(torch.ones(2)) if r else hvd.barrier(),
        "Deadlock: rank 0 waits in hvd.barrier, which ranks 1-2 did not call; rank 1 waits in hvd.allreduce",
    ),
    "a joined rank": (
        lambda r: hvd.join() if r == 2 else hvd.allgather(torch.ones(2)),
        r"hvd.allgather: rank 2 called hvd.join\(\), and only allreduce works",
    ),
}


@pytest.mark.parametrize("what", BETWEEN_RANKS)
def test_ranks_that_differ_all_learn_of_it(world: Any, what: str) -> None:
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
    "sparse": (lambda r: hvd.allreduce(torch.eye(2).to_sparse()), ValueError, "use hvd.sparse_allreduce_async"),
    "truths": (lambda r: hvd.allreduce(torch.ones(2).bool()), ValueError, "cannot average booleans"),
    "both": (lambda r: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), ValueError, "supersedes average"),
    "no op": (lambda r: hvd.allreduce(torch.ones(2), op=17), ValueError, "op must be .* got 17"),
    "adasum": (lambda r: hvd.allreduce(torch.ones(2), op=hvd.Adasum), NotImplementedError, "Adasum is not supported"),
    "elastic": (lambda r: hvd.elastic.TorchState, NotImplementedError, r"hvd.elastic.TorchState is not supported"),
    "scalar rows": (lambda r: hvd.allgather(torch.tensor(1.0)), ValueError, "rank-zero tensor"),
    "scalar parts": (lambda r: hvd.reducescatter(torch.tensor(1.0)), ValueError, "rank-zero tensor"),
    "uneven": (lambda r: hvd.alltoall(torch.ones(4)), ValueError, "4 rows without splits"),
    "splits": (lambda r: hvd.alltoall(torch.ones(2), [1, 1, 1]), ValueError, "must not exceed the number of rows"),
    "float splits": (lambda r: hvd.alltoall(torch.ones(3), torch.ones(3)), ValueError, "splits of torch.float32"),
    "root": (lambda r: hvd.broadcast(torch.ones(2), 3), ValueError, r"root_rank=3 is not in the process set"),
    "no tensors": (lambda r: hvd.grouped_allreduce([]), ValueError, "needs at least one tensor"),
    "no set": (
        lambda r: hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([0, 1])),
        ValueError,
        "does not exist or has not been registered",
    ),
    "set twice": (lambda r: hvd.add_process_set([0, 1, 2]), ValueError, "duplicate process set"),
    "far set": (lambda r: hvd.add_process_set([0, 7]), ValueError, "must be distinct and from 0 to 2"),
    "named set": (lambda r: hvd.ProcessSet(["0"]), ValueError, "as integers"),  # type: ignore[list-item]
    "mpi": (lambda r: hvd.mpi_threads_supported(), ValueError, "MPI is not enabled"),
    "mpi set": (lambda r: hvd.ProcessSet(5), NotImplementedError, "MPI is not supported"),  # type: ignore[arg-type]
    "part of the world": (lambda r: hvd.init(comm=[0, 1]), NotImplementedError, "hvd.init\\(process_sets="),
    "parameters": (lambda r: hvd.broadcast_parameters(5, 0), ValueError, "invalid params of type"),  # type: ignore[arg-type]
    "predivide": (
        lambda r: hvd.DistributedOptimizer(optimizer(), op=hvd.Sum, gradient_predivide_factor=2.0),
        ValueError,
        "not supported with op != Average",
    ),
    "passes": (
        lambda r: hvd.DistributedOptimizer(optimizer(), backward_passes_per_step=0),
        ValueError,
        "must be > 0",
    ),
    "adasum optimizer": (
        lambda r: hvd.DistributedOptimizer(optimizer(), op=hvd.Adasum),
        NotImplementedError,
        "use hvd.Average",
    ),
    "no names": (
        lambda r: hvd.DistributedOptimizer(optimizer(), named_parameters=[]),
        ValueError,
        r"were not named: those of shape \(1, 2\), \(1,\)",
    ),
    "names": (
        lambda r: hvd.DistributedOptimizer(optimizer(), named_parameters=[("a", torch.ones(1)), ("a", torch.ones(1))]),
        ValueError,
        "Found duplicates: a",
    ),
    "plain names": (
        lambda r: hvd.DistributedOptimizer(optimizer(), named_parameters=["a"]),  # type: ignore[list-item]
        ValueError,
        "sequence of tuples",
    ),
    "groups": (lambda r: hvd.DistributedOptimizer(optimizer(), groups=-1), ValueError, "non-negative integer"),
    "grouped twice": (
        lambda r: hvd.DistributedOptimizer(made := optimizer(), groups=[[made.param_groups[0]["params"][0]] * 2]),
        ValueError,
        "can only appear once",
    ),
    "max gradient": (
        lambda r: hvd.allreduce(torch.ones(2, requires_grad=True), op=hvd.Max).sum().backward(),
        NotImplementedError,
        "defined for Average and Sum",
    ),
}


def optimizer() -> torch.optim.Optimizer:
    """An optimizer of a small model."""
    return torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)


def test_what_one_rank_can_know_is_refused_there(world: Any) -> None:
    def work(world: World) -> list[Any]:
        hvd.init()
        seen = []
        for call, kind, pattern in ALONE.values():
            try:
                seen.append(f"gave {call(world.rank())}")
            except Exception as error:
                fits = isinstance(error, kind) and re.search(pattern, str(error))
                seen.append(None if fits else f"{type(error).__name__}: {error}")
            assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item() == 3.0
        return seen

    for seen in world.run(work):
        assert {name: problem for name, problem in zip(ALONE, seen, strict=True) if problem} == {}


def test_a_name_is_taken_until_its_call_is_synchronized(world: Any) -> None:
    def work(world: World) -> Any:
        hvd.init()
        first = hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Sum)
        with pytest.raises(ValueError, match="'twice' is used by an earlier call that is not synchronized yet"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.allgather(torch.ones(1), name="twice")  # another collective has names of its own
        hvd.synchronize(first)
        return hvd.allreduce(torch.ones(1), name="twice", op=hvd.Sum).item()

    assert world.run(work) == [3.0] * 3


def test_one_rank_calls_long_before_the_others(world: Any) -> None:
    """As in Horovod, a call does not keep the calls of other names from being completed."""

    def work(world: World) -> Any:
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(1), name="early", op=hvd.Sum) if world.rank() == 0 else None
        hvd.barrier()
        hvd.barrier()
        if handle is None:
            handle = hvd.allreduce_async(torch.ones(1), name="early", op=hvd.Sum)
        return hvd.synchronize(handle).item()

    assert world.run(work) == [3.0] * 3


def test_nothing_works_before_init(world: Any) -> None:
    calls: list[Callable[[], Any]] = [
        hvd.size,
        hvd.local_rank,
        hvd.cross_size,
        hvd.barrier,
        hvd.join,
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.DistributedOptimizer(optimizer()),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.SyncBatchNorm(2)(torch.ones(2, 2)),
        lambda: hvd.start_timeline("trace.json"),
    ]

    def work(world: World) -> Any:
        hvd.shutdown()
        for call in calls:
            with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)\."):
                call()
        return hvd.is_initialized(), hvd.global_process_set.ranks

    assert world.run(work) == [(False, [])] * 3


def test_process_sets_of_init(world: Any) -> None:
    def work(world: World) -> Any:
        hvd.shutdown()
        outer, last = hvd.ProcessSet([2, 0]), hvd.ProcessSet([2])
        hvd.init(process_sets=[outer, last])
        refused = ""
        try:
            hvd.allgather(torch.tensor([world.rank()]), process_set=outer)
        except ValueError as error:
            refused = str(error)
        hvd.init(process_sets="dynamic")
        seen = str(outer), last.size(), hvd.ProcessSet([0]).size(), refused
        hvd.shutdown()
        return seen

    for rank, (outer, size, unknown, refused) in enumerate(world.run(work)):
        assert outer == "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"
        assert (size, unknown) == (1, None)
        assert ("rank 1 is not part of process set 1 of ranks [0, 2]" in refused) == (rank == 1)
