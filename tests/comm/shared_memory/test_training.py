"""What trains over shared memory: the same weights as over Gloo, and its operations in torch.profiler's traces."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from axon_nb.comm import World


def model() -> nn.Sequential:
    """The same small model on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def steps(trained: nn.Module, rank: int, count: int = 4) -> None:
    """Some steps on this rank's data."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
    for step in range(count):
        data = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        trained(data).square().mean().backward()
        optimizer.step()


def weights(trained: nn.Module) -> torch.Tensor:
    """All parameters, whole."""
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def on_both(shm_world: Any, work: Any) -> None:
    """`work(rank, backend)` gives the same weights on both backends, and the same bits on all ranks."""

    def run(world: World) -> Any:
        return [work(world.rank(), backend) for backend in ("gloo", "shm")]

    results = shm_world.run(run)
    for theirs, ours in results:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours, results[0][1])


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True}])
def test_ddp(shm_world: Any, options: dict[str, Any]) -> None:
    def work(rank: int, backend: str) -> torch.Tensor:
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(model(), process_group=dist.new_group(backend=backend), **options)
        steps(wrapped, rank)
        return weights(wrapped)

    on_both(shm_world, work)


def test_ddp_with_a_communication_hook_and_unused_parameters(shm_world: Any) -> None:
    def work(rank: int, backend: str) -> torch.Tensor:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        group = dist.new_group(backend=backend)
        wrapped = DistributedDataParallel(model(), process_group=group, find_unused_parameters=True)
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
        steps(wrapped, rank, 2)
        return weights(wrapped).round(decimals=1) + 0.0

    on_both(shm_world, work)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp(shm_world: Any, reshard: bool) -> None:
    def work(rank: int, backend: str) -> torch.Tensor:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")
        sharded = model()
        for layer in (sharded[0], sharded[2], sharded[4]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(sharded, mesh=mesh)
        steps(sharded, rank)
        return weights(sharded)

    on_both(shm_world, work)


def test_dtensor_and_tensor_parallelism(shm_world: Any) -> None:
    def work(rank: int, backend: str) -> torch.Tensor:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")
        tensor = distribute_tensor(torch.arange(40.0).view(10, 4), mesh, [Shard(0)])
        for placement in (Shard(1), Replicate(), Shard(0)):
            tensor = tensor.redistribute(mesh, [placement])
        assert torch.equal(tensor.full_tensor(), torch.arange(40.0).view(10, 4))
        split = model()
        parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        steps(split, 0)
        return weights(split)

    on_both(shm_world, work)


def test_functional_collectives(shm_world: Any) -> None:
    def work(world: World) -> Any:
        import torch.distributed._functional_collectives as functional

        rank, group = world.rank(), dist.group.WORLD
        total = functional.all_reduce(torch.full((3,), float(rank)), "sum", group)
        whole = functional.all_gather_tensor(torch.tensor([rank]), 0, group)
        part = functional.reduce_scatter_tensor(torch.arange(8.0), "sum", 0, group)
        turned = functional.all_to_all_single(torch.arange(4) + 10 * rank, None, None, group)
        many = functional.all_reduce_coalesced([torch.ones(2), torch.full((5,), 2.0)], "sum", group)
        sent = functional.broadcast(torch.tensor([rank]), 2, group)
        return [item.tolist() for item in (total, whole, part, turned, *many, sent)]

    for rank, found in enumerate(shm_world.run(work)):
        parts = [[6.0] * 3, [0, 1, 2, 3], [8.0 * rank, 8.0 * rank + 4], [rank, 10 + rank, 20 + rank, 30 + rank]]
        assert found == [*parts, [4.0] * 2, [8.0] * 5, [2]]


def test_coalesced_calls(shm_world: Any) -> None:
    def work(world: World) -> Any:
        from torch.distributed.distributed_c10d import _coalescing_manager

        tensors = [torch.full((size,), float(world.rank())) for size in (3, 70_000)]
        with _coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        outputs = [torch.empty(4 * size) for size in (1, 5)]
        with _coalescing_manager():
            for output in outputs:
                dist.all_gather_into_tensor(output, torch.full((output.numel() // 4,), float(world.rank())))
        return [tensor.unique().tolist() for tensor in (*tensors, *outputs)]

    assert shm_world.run(work) == [[[6.0], [6.0], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]] * 4


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipelines(shm_world: Any, name: str) -> None:
    def work(world: World) -> Any:
        from torch.distributed import pipelining

        rank, n = world.rank(), world.world_size()
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2 * n)]
        whole = nn.Sequential(*layers)
        data = torch.randn(16, 16)
        whole(data).square().mean().backward()
        expected = [layer[0].weight.grad.clone() for layer in layers]
        whole.zero_grad()
        interleaved = "Interleaved" in name
        chunks = [[rank], [rank + n]] if interleaved else [[2 * rank, 2 * rank + 1]]
        stages = [
            pipelining.PipelineStage(
                nn.Sequential(*(layers[number] for number in chunk)),
                rank + n * place,
                n * len(chunks),
                torch.device("cpu"),
            )
            for place, chunk in enumerate(chunks)
        ]
        kind = getattr(pipelining, name)
        schedule = kind(stages if interleaved else stages[0], 4, loss_fn=lambda out, target: out.square().mean())
        last = rank == n - 1
        schedule.step(*([data] if rank == 0 else []), **({"target": torch.zeros(16, 16)} if last else {}))
        for chunk in chunks:
            for number in chunk:
                torch.testing.assert_close(layers[number][0].weight.grad, expected[number], rtol=1e-4, atol=1e-6)

    shm_world.run(work)


def test_checkpoints(shm_world: Any, tmp_path: Any) -> None:
    def work(world: World, folder: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        sharded = fully_shard(model(), mesh=mesh)
        steps(sharded, world.rank(), 1)
        dcp.save({"model": sharded.state_dict()}, checkpoint_id=folder)
        other = fully_shard(model(), mesh=mesh)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        assert torch.equal(weights(other), weights(sharded))

    shm_world.run(work, str(tmp_path / "checkpoint"))


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
