"""The examples of AxonML's guide, "Distributed Training", in its order and with its sizes, in mock worlds.

Examples that other tests cover are not repeated; `docs/parity/examples.csv` names them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from axon_nb.comm import World, all_gather
from axon_nb.parallel import (
    DDP,
    FSDP,
    ColumnParallelLinear,
    CPUOffload,
    Pipeline,
    PipelineSchedule,
    PipelineStage,
    RowParallelLinear,
    ShardingStrategy,
    TensorParallelAttention,
    axis_group,
    make_mesh,
)

F64: dict[str, Any] = {"dtype": torch.float64}


def seeded(*shape: int) -> torch.Tensor:
    """The same numbers at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), **F64)


def test_data_distributed_parallel() -> None:
    def main(world: World) -> list[torch.Tensor]:
        rank, world_size = world.rank(), world.world_size()
        model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).double()
        ddp_model = DDP(model, world.default_group())
        ddp_model.sync_parameters()
        optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.001)
        inputs, targets = seeded(3, 16, 784), torch.arange(48).view(3, 16) % 10
        for _ in range(2):
            for x, y in zip(inputs, targets, strict=True):
                output = ddp_model(x.chunk(world_size)[rank])
                loss = F.cross_entropy(output, y.chunk(world_size)[rank])
                optimizer.zero_grad()
                loss.backward()
                ddp_model.sync_gradients()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    (alone,) = World.mock(1).run(main)
    for weights in World.mock(4).run(main):
        for weight, expected in zip(weights, alone, strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-8, atol=1e-9)


def test_basic_fsdp() -> None:
    def main(world: World) -> Any:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        input_ = seeded(4, 6)
        expected = model(input_).detach()
        fsdp_model = FSDP(
            model, world.default_group(), strategy=ShardingStrategy.FULL_SHARD, cpu_offload=CPUOffload.NONE
        )
        output = fsdp_model(input_)
        output.square().mean().backward()
        fsdp_model.optimizer(torch.optim.SGD, lr=0.1).step()
        default = FSDP(nn.Linear(2, 2), world.default_group()).strategy
        return output.detach(), expected, fsdp_model.process_group.size(), default, fsdp_model.strategy

    for output, expected, size, default, chosen in World.mock(2).run(main):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        assert size == 2
        assert default is chosen is ShardingStrategy.FULL_SHARD


def test_pipeline_parallelism() -> None:
    def stages() -> list[nn.Sequential]:
        return [
            nn.Sequential(nn.Linear(784, 1024), nn.ReLU()),
            nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()),
            nn.Sequential(nn.Linear(1024, 10)),
        ]

    def main(world: World, input_: torch.Tensor) -> Any:
        stage0, stage1, stage2 = stages()
        pipeline = Pipeline(
            [PipelineStage(stage0, "cpu"), PipelineStage(stage1, "cpu"), PipelineStage(stage2, "cpu")],
            num_microbatches=8,
            schedule=PipelineSchedule.GPIPE,
        )
        return pipeline(input_)

    input_ = seeded(16, 784).float()
    torch.manual_seed(0)
    with torch.no_grad():
        expected = nn.Sequential(*stages())(input_)
    torch.manual_seed(0)
    first, second, output = World.mock(3).run(main, input_)
    assert first is second is None
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_pipeline_schedules() -> None:
    assert PipelineSchedule.of("GPipe") is PipelineSchedule.GPIPE
    assert PipelineSchedule.of("Interleaved1F1B") is PipelineSchedule.INTERLEAVED_1F1B

    def main(world: World, schedule: str, num_stages: int) -> Any:
        layers = [nn.Linear(4, 4, **F64) for _ in range(num_stages)]
        pipeline = Pipeline(layers, schedule=schedule, num_microbatches=4, loss=F.mse_loss)
        losses = pipeline.step(seeded(8, 4), seeded(8, 4) + 1)
        gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
        return pipeline.mean_loss(losses), gradients

    def alone(num_stages: int) -> tuple[float, nn.Sequential]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, **F64) for _ in range(num_stages)))
        loss = F.mse_loss(model(seeded(8, 4)), seeded(8, 4) + 1)
        loss.backward()
        return loss.item(), model

    for schedule, num_stages in (("GPipe", 2), ("Interleaved1F1B", 4)):
        loss, model = alone(num_stages)
        torch.manual_seed(0)
        seen = set()
        for there, gradients in World.mock(2).run(main, schedule, num_stages):
            assert there == pytest.approx(loss, rel=1e-12)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
                seen.add(name)
        assert seen == {name for name, _ in model.named_parameters()}


def test_tensor_parallelism() -> None:
    def main(world: World) -> Any:
        pg = world.default_group()
        col_linear = ColumnParallelLinear(1024, 4096, group=pg)
        row_linear = RowParallelLinear(4096, 1024, group=pg)
        x = seeded(2, 1024).float()
        with torch.no_grad():
            h = F.gelu(col_linear(x))
            output = row_linear(h)
            up = all_gather(col_linear.weight), all_gather(col_linear.bias)
            whole = F.linear(F.gelu(F.linear(x, *up)), all_gather(row_linear.weight, dim=1), row_linear.bias)
        return tuple(h.shape), output, whole

    for shape, output, whole in World.mock(2).run(main):
        assert shape == (2, 2048)
        torch.testing.assert_close(output, whole, rtol=1e-4, atol=1e-5)


def test_hybrid_parallelism() -> None:
    """8 ranks: 2-way tensor x 4-way data parallelism, with groups of its own for every rank."""
    hidden_size, num_heads = 16, 4

    def main(world: World) -> Any:
        tp = min(2, world.world_size())
        mesh = make_mesh(dp=-1, tp=tp, device="cpu")
        tp_group, dp_group = axis_group(mesh, "tp"), axis_group(mesh, "dp")
        attn = TensorParallelAttention(hidden_size, num_heads, group=tp_group, **F64)
        ddp_model = DDP(attn, dp_group)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
        own = seeded(8, 5, hidden_size).chunk(dp_group.size())[dp_group.rank()]
        for _ in range(2):
            optimizer.zero_grad()
            ddp_model(own).square().mean().backward()
            optimizer.step()
        return tp_group.ranks, dp_group.ranks, all_gather(attn.query.weight.detach(), group=tp_group)

    ((*_, expected),) = World.mock(1).run(main)
    answers = World.mock(8).run(main)
    assert answers[0][:2] == ((0, 1), (0, 2, 4, 6))
    assert answers[5][:2] == ((4, 5), (1, 3, 5, 7))
    for *_, weight in answers:
        torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-12)


def test_memory_stats() -> None:
    def main(world: World) -> Any:
        fsdp_model = FSDP(nn.Linear(100, 50), world.default_group())
        stats = fsdp_model.memory_stats()
        reported = f"Peak memory: {stats.peak_memory_mb:.0f} MB, current allocation: {stats.current_allocation_mb} MB"
        return reported, stats.peak_memory_mb, stats.current_allocation_mb

    held = (25 * 100 + 25) * 4 / 2**20  # half of the parameters; no gradients and no states yet
    for reported, peak, current in World.mock(2).run(main):
        assert current == pytest.approx(held)
        assert peak > current
        assert reported.startswith("Peak memory: ")
