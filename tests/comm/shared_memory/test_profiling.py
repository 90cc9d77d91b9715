"""Operations over shared memory are in the traces of torch.profiler, from their start to their end."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from axon_nb.comm import World


def _waits_in_barrier(line: str) -> bool:
    return "barrier" in line and "waits for rank 1" in line


def test_each_operation_is_recorded_until_it_is_done(shm_world: Any) -> None:
    def work(world: World) -> dict[str, tuple[int, float]]:
        import torch.distributed as dist
        from torch.profiler import ProfilerActivity, profile

        group: Any = dist.group.WORLD
        rank, size = world.rank(), world.world_size()
        tensor, out = torch.ones(size), torch.zeros(size)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            dist.all_reduce(tensor)
            dist.reduce_scatter(out[:1], list(tensor.split(1)))
            handle = dist.broadcast(tensor, 0, async_op=True)
            handle.wait()
            if rank == 1:
                limit = time.monotonic() + 60
                while not _waits_in_barrier(group.describe()[0]) and time.monotonic() < limit:
                    time.sleep(0.005)
                time.sleep(0.2)  # rank 0 waits at least so long
            dist.barrier()
            messages = [dist.isend(tensor, (rank + 1) % size), dist.irecv(out, (rank - 1) % size)]
            for message in messages:
                message.wait()
        dist.all_reduce(tensor)  # not recorded
        longest: dict[str, tuple[int, float]] = {}
        for event in profiler.events():
            if event.name.startswith("shm:"):
                count, duration = longest.get(event.name, (0, 0.0))
                longest[event.name] = count + 1, max(duration, event.time_range.elapsed_us() / 1e6)
        return longest

    for rank, longest in enumerate(shm_world.run(work)):
        names = ("all_reduce", "reduce_scatter", "broadcast", "barrier", "send", "recv")
        assert {name: count for name, (count, _) in longest.items()} == {f"shm:{name}": 1 for name in names}
        if rank == 0:
            assert longest["shm:barrier"][1] > 0.1


def test_a_refused_operation_ends_its_record(shm_world: Any) -> None:
    def work(world: World) -> list[str]:
        import torch.distributed as dist
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with pytest.raises(RuntimeError):
                dist.all_gather([torch.ones(2)] * world.world_size(), torch.ones(3))
            dist.barrier()
        return sorted(event.name for event in profiler.events() if event.name.startswith("shm:"))

    assert all(names[-1:] == ["shm:barrier"] for names in shm_world.run(work))
