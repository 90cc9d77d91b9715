"""The examples of the README of `axonml-distributed` 0.6.1, in its order, with our prelude.

Examples that other tests cover are not repeated; `docs/parity/examples.csv` names them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import is_main_process, rank, world_size
from axon_nb.prelude import (
    DDP,
    ColumnParallelLinear,
    CPUOffload,
    DistributedDataParallel,
    FullyShardedDataParallel,
    GradientBucket,
    MockBackend,
    Pipeline,
    PipelineMemoryStats,
    PipelineSchedule,
    ProcessGroup,
    RowParallelLinear,
    ShardingStrategy,
    World,
    all_gather,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_product,
    all_reduce_sum,
    barrier,
    broadcast,
    broadcast_from,
    gather_tensor,
    reduce_scatter_mean,
    reduce_scatter_sum,
    scatter_tensor,
)


def test_basic_ddp_training() -> None:
    world = World.mock()
    model = nn.Linear(10, 5)
    ddp = DistributedDataParallel(model, world.default_group())
    ddp.sync_parameters()
    ddp.train()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = ddp(torch.ones(4, 10)).square().mean()
        loss.backward()
        ddp.sync_gradients()
        optimizer.step()
        losses.append(loss.item())
    assert ddp.training
    assert ddp.module is model
    assert losses[2] < losses[1] < losses[0]


def test_ddp_builder() -> None:
    pg = ProcessGroup.mock()
    for as_view in (False, True):
        ddp = DDP(nn.Linear(3, 2), pg, broadcast_buffers=False, gradient_as_bucket_view=as_view)
        assert ddp.gradient_as_bucket_view is as_view
        ddp(torch.ones(1, 3)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.0] * 3] * 2


def test_fsdp() -> None:
    def main(world: World) -> Any:
        fsdp = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
            world.default_group(),
            strategy=ShardingStrategy.FULL_SHARD,
            cpu_offload=CPUOffload.PARAMS,
            mixed_precision=torch.bfloat16,
        )
        fsdp.gather_parameters()
        whole = tuple(fsdp.module[0].weight.shape)
        fsdp.reshard_parameters()
        part = tuple(fsdp.module[0].weight.to_local().shape)
        (100 * fsdp(torch.ones(4, 8)).float().square().mean()).backward()
        fsdp.sync_gradients()
        fsdp.clip_grad_norm(1.0)
        grad_norm = fsdp.clip_grad_norm(1.0)  # of what the first call has left
        stats = fsdp.memory_estimate()
        return whole, part, grad_norm, stats

    elements = 8 * 16 + 16 + 16 * 4 + 4
    for whole, part, grad_norm, stats in World.mock(2).run(main):
        assert (whole, part) == ((16, 8), (8, 8))
        assert grad_norm == pytest.approx(1.0, rel=1e-3)
        assert (stats.total_params, stats.world_size) == (elements, 2)
        assert stats.total_memory_mb() == pytest.approx(4 * elements / 2 * 4 / 2**20)
        reported = f"FSDP total: {stats.total_memory_mb():.1f} MB (savings {stats.memory_savings() * 100.0:.1f}%)"
        assert reported == "FSDP total: 0.0 MB (savings 50.0%)"


def test_pipeline_parallelism() -> None:
    def main(world: World) -> Any:
        stage_modules = [nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)]
        expected = nn.Sequential(*stage_modules)(torch.ones(16, 4)).detach()
        pipe = Pipeline.from_modules(
            stage_modules, group=world.default_group(), schedule=PipelineSchedule.ONE_F_ONE_B, num_microbatches=8
        )
        output = pipe(torch.ones(16, 4))
        peak = PipelineMemoryStats.one_f_one_b_peak_activations(pipe.num_stages, 8)
        return output, expected, peak, pipe.num_stages

    answers = World.mock(3).run(main)
    assert [output is None for output, *_ in answers] == [True, True, False]
    torch.testing.assert_close(answers[2][0], answers[2][1])
    assert [reported[2:] for reported in answers] == [(3, 3)] * 3


def test_tensor_parallelism() -> None:
    """As its source's own tests: a group of this rank alone holds the whole layer."""
    pg = ProcessGroup.mock()
    column = ColumnParallelLinear(8, 4, bias=True, gather_output=False, group=pg)
    row = RowParallelLinear(8, 4, bias=True, input_is_parallel=False, group=pg)
    for layer in (column, row):
        output = layer(torch.randn(2, 8))
        assert output.shape == (2, 4)
        output.sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())


def test_communication_primitives() -> None:
    pg = ProcessGroup.mock()
    tensor = torch.tensor([1.0, 2.0, 3.0])
    for reduce in (all_reduce_sum, all_reduce_mean, all_reduce_max, all_reduce_min, all_reduce_product):
        assert reduce(tensor, group=pg) is tensor
    assert broadcast(tensor, group=pg) is broadcast_from(tensor, 0, group=pg) is tensor
    moved = [
        all_gather(tensor, group=pg),
        reduce_scatter_sum(tensor, group=pg),
        reduce_scatter_mean(tensor, group=pg),
        gather_tensor(tensor, dst=0, group=pg),
        scatter_tensor(tensor, src=0, group=pg),
    ]
    assert all(result.tolist() == tensor.tolist() == [1.0, 2.0, 3.0] for result in moved)
    barrier(group=pg)
    assert (rank(pg), world_size(pg), is_main_process(pg)) == (0, 1, True)

    def main(world: World) -> Any:
        pg, own = world.default_group(), torch.tensor([1.0, 2.0, 3.0, 4.0]) * (world.rank() + 1)
        reduced = [
            reduce(own.clone(), group=pg).tolist()
            for reduce in (all_reduce_sum, all_reduce_mean, all_reduce_max, all_reduce_min, all_reduce_product)
        ]
        sent = broadcast_from(own.clone(), 1, group=pg).tolist()
        return reduced, sent, reduce_scatter_sum(own, group=pg).tolist(), rank(pg), is_main_process(pg)

    reduced = [[3.0, 6.0, 9.0, 12.0], [1.5, 3.0, 4.5, 6.0], [2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0, 4.0]]
    reduced.append([2.0, 8.0, 18.0, 32.0])
    assert World.mock(2).run(main) == [
        (reduced, [2.0, 4.0, 6.0, 8.0], part, number, number == 0)
        for number, part in enumerate(([3.0, 6.0], [9.0, 12.0]))
    ]


def test_gradient_bucketing() -> None:
    def main(world: World) -> Any:
        bucket = GradientBucket(1000)
        factor = float(world.rank() + 1)
        added = [bucket.add(torch.tensor(values) * factor) for values in ([0.1, 0.2], [0.3, 0.4, 0.5])]
        bucket.sync(group=world.default_group())
        return added, bucket.extract()

    for added, (grad1, grad2) in World.mock(3).run(main):
        assert added == [True, True]
        torch.testing.assert_close(grad1, torch.tensor([0.2, 0.4]))
        torch.testing.assert_close(grad2, torch.tensor([0.6, 0.8, 1.0]))


def test_multi_backend_setup() -> None:
    backends = MockBackend.create_world(4)
    groups = [ProcessGroup.from_backend(backend) for backend in backends]
    assert [f"Rank {pg.rank()} of {pg.world_size()}" for pg in groups] == [f"Rank {rank} of 4" for rank in range(4)]
    handles = [all_reduce_sum(torch.tensor([float(pg.rank())]), group=pg, async_op=True) for pg in groups]
    assert [handle.wait().item() for handle in handles] == [6.0] * 4
