"""Operations over shared memory are in the traces of torch.profiler from start to end, and are counted as Gloo's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from axon_nb.comm import World


def _waits_in_barrier(line: str) -> bool:
    return "barrier" in line and "waits for rank 1" in line


def test_operation_is_recorded_until_completion(shm_world: Any) -> None:
    def work(world: World) -> dict[str, tuple[int, float]]:
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


def test_rejected_operation_ends_its_record(shm_world: Any) -> None:
    def work(world: World) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with pytest.raises(RuntimeError):
                dist.all_gather([torch.ones(2)] * world.world_size(), torch.ones(3))
            dist.barrier()
        return sorted(event.name for event in profiler.events() if event.name.startswith("shm:"))

    assert all(names[-1:] == ["shm:barrier"] for names in shm_world.run(work))


def _send_around(group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for receive in (
        lambda: dist.recv(torch.ones(1), (rank - 1) % size, group),
        lambda: dist.recv(torch.ones(1), group=group),
    ):
        handle: Any = dist.isend(torch.ones(1), (rank + 1) % size, group)
        receive()
        handle.wait()


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(4), group=group),
    "asynchronous": lambda group: dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(),
    "broadcast": lambda group: dist.broadcast(torch.ones(4), 0, group=group),
    "reduce": lambda group: dist.reduce(torch.ones(4), 0, group=group),
    "all_gather": lambda group: dist.all_gather([torch.ones(4) for _ in range(4)], torch.ones(4), group=group),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(torch.ones(16), torch.ones(4), group=group),
    "gather": lambda group: dist.gather(
        torch.ones(4), [torch.ones(4) for _ in range(4)] if dist.get_rank() == 0 else None, group=group
    ),
    "scatter": lambda group: dist.scatter(
        torch.ones(4), [torch.ones(4) for _ in range(4)] if dist.get_rank() == 0 else None, group=group
    ),
    "reduce_scatter": lambda group: dist.reduce_scatter(torch.ones(4), [torch.ones(4) for _ in range(4)], group=group),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(16), group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(torch.ones(4), torch.ones(4), group=group),
    "functional": lambda group: funcol.wait_tensor(funcol.all_reduce(torch.ones(4), "sum", group)),
    "barrier": lambda group: dist.barrier(group=group),
    "messages": _send_around,
}


def test_comm_debug_mode_and_profilers_count_calls_as_on_gloo(shm_world: Any) -> None:
    def work(world: World) -> list[tuple[str, Any, Any]]:
        found = []
        gloo = dist.new_group(backend="gloo")
        for name, call in CALLS.items():
            counts: list[tuple[dict[str, int], dict[str, int]]] = []
            for group in (dist.group.WORLD, gloo):
                with CommDebugMode() as mode:
                    call(group)
                with profile(activities=[ProfilerActivity.CPU]) as profiler:
                    call(group)
                operators = Counter(event.name for event in profiler.events() if event.name.startswith("c10d::"))
                counts.append(({str(key): count for key, count in mode.get_comm_counts().items()}, dict(operators)))
            found.append((name, *counts))
        dist.destroy_process_group(gloo)
        return found

    for found in shm_world.run(work):
        for name, ours, theirs in found:
            assert ours == theirs, name
        assert sum(bool(ours[0]) for _, ours, _ in found) == len(CALLS) - 2  # barriers and messages are not counted
