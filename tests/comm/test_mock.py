"""Mock worlds: torch's real wrappers run in them, results are deterministic, and no rank waits forever."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from axon_nb import comm
from axon_nb.comm import (
    CollectiveMismatchError,
    CommError,
    DeadlockError,
    InvalidArgumentError,
    InvalidRankError,
    ProcessGroup,
    TensorMismatchError,
    World,
)
from tests.support.training.models import batch, blocks, loss_of, reference_step

N = 4
# (schedule, ranks, stages, whether each rank has one stage from the front and one from the back)
SCHEDULES = [
    (ScheduleGPipe, 4, 4, False),
    (Schedule1F1B, 4, 4, False),
    (ScheduleInterleaved1F1B, 2, 4, False),
    (ScheduleLoopedBFS, 2, 4, False),
    (ScheduleInterleavedZeroBubble, 4, 8, False),
    (ScheduleZBVZeroBubble, 4, 8, True),
    (ScheduleDualPipeV, 4, 8, True),
]
LOSS, WEIGHTS = reference_step()


def assert_same(weights: dict[str, torch.Tensor]) -> None:
    """Assert that the weights equal those of a single process, up to rounding."""
    for name, weight in weights.items():
        torch.testing.assert_close(weight, WEIGHTS[name], rtol=1e-10, atol=1e-12)


def test_ddp_trains_as_one_process() -> None:
    def work(world: World) -> Any:
        model = DistributedDataParallel(blocks())
        x, y = (part.chunk(N)[world.rank()] for part in batch())
        loss = loss_of(model(x), y)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return comm.all_reduce_mean(loss.detach()).item(), dict(model.module.named_parameters())

    for loss, weights in World.mock(N).run(work):
        assert loss == pytest.approx(LOSS, rel=1e-12)
        assert_same({name: weight.detach() for name, weight in weights.items()})


def test_fsdp2_trains_as_one_process() -> None:
    def work(world: World) -> Any:
        model = blocks()
        mesh = init_device_mesh("cpu", (N,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x, y = (part.chunk(N)[world.rank()] for part in batch())
        loss_of(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        parameters: dict[str, Any] = dict(model.named_parameters())
        return {name: weight.full_tensor().detach() for name, weight in parameters.items()}

    for weights in World.mock(N).run(work):
        assert_same(weights)


def test_tensor_parallel_layers_give_the_same_gradients() -> None:
    def work(world: World) -> Any:
        model = blocks()
        mesh = init_device_mesh("cpu", (N,))
        plan = {f"{index}.up": ColwiseParallel() for index in range(4)}
        parallelize_module(model, mesh, plan | {f"{index}.down": RowwiseParallel() for index in range(4)})
        x, y = batch()
        loss_of(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        values = dict(model.named_parameters())
        return {n: (w.full_tensor() if isinstance(w, DTensor) else w).detach() for n, w in values.items()}

    for weights in World.mock(N).run(work):
        assert_same(weights)


@pytest.mark.parametrize(
    ("kind", "size", "num_stages", "in_a_v"), SCHEDULES, ids=lambda item: getattr(item, "__name__", None)
)
def test_pipelines_give_the_same_gradients(kind: Any, size: int, num_stages: int, in_a_v: bool) -> None:
    def work(world: World) -> Any:
        model, rank = blocks(num_stages), world.rank()
        own = [rank, num_stages - 1 - rank] if in_a_v else list(range(rank, num_stages, size))
        stages = [PipelineStage(model[index], index, num_stages, torch.device("cpu")) for index in own]
        schedule = kind(stages if num_stages > size else stages[0], 8, loss_fn=loss_of)
        x, y = batch(16)
        losses: list[torch.Tensor] = []
        target = {"target": y, "losses": losses} if num_stages - 1 in own else {}
        schedule.step(*([x] if 0 in own else []), **target)
        gradients = {f"{index}.{name}": p.grad for index in own for name, p in model[index].named_parameters()}
        return gradients, [loss.item() for loss in losses]

    model = blocks(num_stages)
    x, y = batch(16)
    loss = loss_of(model(x), y)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    answers = World.mock(size).run(work)
    gradients = {name: gradient for own, _ in answers for name, gradient in own.items()}
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)
    losses = [value for _, values in answers for value in values]
    assert np.mean(losses) == pytest.approx(loss.item(), rel=1e-12)


def test_every_run_gives_the_same_bits() -> None:
    def work(world: World) -> Any:
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 16) * (1 + world.rank())).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), random.random(), np.random.rand()

    def once() -> list[Any]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        return World.mock(3).run(work)

    first, second = once(), once()
    for (weights, *numbers), (weights_again, *numbers_again) in zip(first, second, strict=True):
        assert torch.equal(weights, weights_again)
        assert numbers == numbers_again


def test_each_rank_has_its_own_random_numbers() -> None:
    def work(world: World) -> Any:
        if world.rank() == 1:
            torch.manual_seed(9)
        world.barrier()
        return torch.rand(2).tolist()

    torch.manual_seed(4)
    outside = torch.get_rng_state()
    zero, one, two = World.mock(3).run(work)
    assert zero == two != one
    assert torch.equal(torch.get_rng_state(), outside), "the caller's are not touched"


def test_arguments_are_copies() -> None:
    mine = torch.zeros(2)

    def work(world: World, given: torch.Tensor, *, add: int) -> torch.Tensor:
        given += world.rank() + add
        return given

    assert [t.tolist() for t in World.mock(2).run(work, mine, add=1)] == [[1.0, 1.0], [2.0, 2.0]]
    assert mine.tolist() == [0.0, 0.0]


def test_first_failure_is_raised_with_its_rank() -> None:
    def work(world: World) -> None:
        if world.rank() == 2:
            raise ValueError("mine")
        world.barrier()

    with pytest.raises(ValueError, match="mine") as caught:
        World.mock(N).run(work)
    assert caught.value.__notes__ == ["raised on rank 2 of 4 of a mock world"]
    # Threads of other tests may finish meanwhile.
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("axon_nb-mock")]
    assert left == []


def test_user_code_cannot_swallow_the_abort() -> None:
    def work(world: World) -> None:
        if world.rank() == 0:
            raise ValueError("mine")
        while True:
            try:
                world.barrier()
            except Exception:
                continue

    with pytest.raises(ValueError, match="mine"):
        World.mock(2).run(work)


def test_deadlock_report_names_waiting_ranks() -> None:
    def work(world: World) -> None:
        if world.rank() != 2:
            comm.barrier()

    with pytest.raises(DeadlockError, match="ranks 0-1,3 are waiting in barrier for rank 2; rank 2 is finished"):
        World.mock(N).run(work)

    def ring(world: World) -> None:
        comm.recv((world.rank() + 1) % 2)

    with pytest.raises(DeadlockError, match=r"rank 0 is waiting in recv for rank 1; rank 1 .* in recv for rank 0"):
        World.mock(2).run(ring)


def test_mismatched_calls_and_shapes_raise() -> None:
    def calls(world: World) -> None:
        if world.rank() == 0:
            comm.barrier()
        else:
            comm.all_reduce_sum(torch.ones(1))

    with pytest.raises(CollectiveMismatchError, match="rank 0 called barrier, rank 1 called all_reduce"):
        World.mock(2).run(calls)

    def shapes(world: World) -> None:
        comm.all_reduce_sum(torch.ones(2 + world.rank()))

    with pytest.raises(TensorMismatchError, match=r"rank 0 passed .* of shape \(2,\), rank 1 .* shape \(3,\)"):
        World.mock(2).run(shapes)


def test_mock_run_restores_torch_state() -> None:
    World.mock(2).run(lambda world: world.barrier())
    assert not dist.is_initialized()
    with pytest.raises(CommError, match="No world is initialized"):
        comm.barrier()


def test_unsupported_operations_raise_in_mock_worlds() -> None:
    with pytest.raises(InvalidArgumentError, match=r"a function that takes the world; got 5"):
        World.mock(2).run(5)  # type: ignore[arg-type]


def test_nested_runs_raise() -> None:
    with pytest.raises(CommError, match="A mock world is already running"):
        World.mock(2).run(lambda world: World.mock(2).run(lambda inner: None))


def test_one_thread_drives_every_rank() -> None:
    groups = World.mock(3).create()
    assert [(group.rank(), group.size(), group.backend) for group in groups] == [(rank, 3, "mock") for rank in range(3)]
    tensors = [torch.full((2,), float(rank + 1)) for rank in range(3)]
    handles = [
        comm.all_reduce_sum(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)
    ]
    assert [handle.wait().tolist() for handle in handles] == [[6.0, 6.0]] * 3
    with pytest.raises(DeadlockError, match=r"barrier for ranks 1-2.*async_op=True"):
        comm.barrier(group=groups[0])


def test_single_process_group() -> None:
    group = ProcessGroup.mock()
    tensor = torch.tensor([1.0, 2.0])
    assert comm.all_reduce_mean(tensor, group=group) is tensor
    assert comm.all_gather(tensor, group=group).tolist() == tensor.tolist() == [1.0, 2.0]
    comm.barrier(group=group)
    world = World.mock()
    assert (world.rank(), world.world_size(), world.default_group().size()) == (0, 1, 1)


def test_mock_world_outside_a_run() -> None:
    world = World.mock(4)
    group = world.new_group([0, 1])
    assert (group.contains(0), group.contains(2), group.size()) == (True, False, 2)
    with pytest.raises(CommError, match="call it on a rank, inside"):
        world.rank()
    with pytest.raises(InvalidRankError, match="world_size must be at least 1; got 0"):
        World.mock(0)
    with pytest.raises(InvalidRankError, match="ranks must be 0 to 3"):
        world.new_group([4])
