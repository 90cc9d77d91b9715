"""Groups of 8 and 16 ranks over shared memory: every collective and messages, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from axon_nb.comm import World
from tests.support.ranks import RankWorld

COUNTS = [3, 40_000]
"""Elements per rank: one piece, and several of what 16 ranks have."""


def _row(rank: int, count: int) -> Any:
    """What a rank puts in: whole numbers, so that sums are exact in any order."""
    return np.random.default_rng(rank).integers(-1000, 1000, count).astype(np.float64)


def _collect(rank: int, size: int, count: int) -> dict[str, Any]:
    """The result of each collective on this rank."""
    own, found = torch.from_numpy(_row(rank, count)), {}
    found["all_reduce"] = own.clone()
    dist.all_reduce(found["all_reduce"])
    found["maximum"] = own.clone()
    dist.all_reduce(found["maximum"], dist.ReduceOp.MAX)
    found["broadcast"] = own.clone()
    dist.broadcast(found["broadcast"], size - 1)
    found["reduce"] = own.clone()
    dist.reduce(found["reduce"], size // 2)
    found["all_gather"] = own.new_empty(size * count)
    dist.all_gather_into_tensor(found["all_gather"], own)
    rows = [torch.empty_like(own) for _ in range(size)] if rank == 1 else None
    dist.gather(own, rows, 1)
    found["gather"] = torch.cat(rows) if rows else None
    found["scatter"] = torch.empty_like(own)
    dist.scatter(found["scatter"], [own + peer for peer in range(size)] if rank == 2 else None, 2)
    wide = torch.cat([own + peer for peer in range(size)])
    found["reduce_scatter"] = torch.empty_like(own)
    dist.reduce_scatter_tensor(found["reduce_scatter"], wide)
    found["all_to_all"] = torch.empty_like(wide)
    dist.all_to_all_single(found["all_to_all"], wide)
    ring = torch.empty_like(own)
    ops = [dist.P2POp(dist.isend, own, (rank + 1) % size), dist.P2POp(dist.irecv, ring, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    found["ring"] = ring
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = [item["rank"] for item in objects]
    dist.barrier()
    return found


def _expected(rank: int, size: int, count: int) -> dict[str, Any]:
    rows = np.stack([_row(peer, count) for peer in range(size)])
    return {
        "all_reduce": rows.sum(0),
        "maximum": rows.max(0),
        "broadcast": rows[size - 1],
        "reduce": rows.sum(0) if rank == size // 2 else None,  # undefined on the others
        "all_gather": rows.ravel(),
        "gather": rows.ravel() if rank == 1 else None,
        "scatter": rows[2] + rank,
        "reduce_scatter": rows.sum(0) + size * rank,
        "all_to_all": (rows + rank).ravel(),
        "ring": rows[(rank - 1) % size],
        "objects": list(range(size)),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_collectives_and_messages_of_many_ranks_match_numpy(size: int) -> None:
    def work(world: World) -> list[str]:
        torch.set_num_threads(1)
        wrong = []
        for count in COUNTS:
            found = _collect(world.rank(), size, count)
            for name, value in _expected(world.rank(), size, count).items():
                if value is not None and not np.array_equal(np.asarray(found[name]), value):
                    wrong.append(f"{name} of {count}")
        return wrong

    with RankWorld(size, backend="shm") as world:
        assert world.run(work) == [[]] * size
