"""Programs as users write them for torchrun: each trains for a few steps, on any number of ranks from two on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from axon_nb.parallel import Muon

WIDTH, BATCH, STEPS = 256, 64, 6


class Block(nn.Module):
    """Two layers and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width), in and out."""
        return x + self.down(torch.relu(self.up(x)))


def _model(blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(blocks)))


def _batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, forward: Callable[[], torch.Tensor] | None = None
) -> Any:
    for _ in range(STEPS):
        output = model(_batch()) if forward is None else forward()
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def ddp() -> Any:
    """Data parallelism."""
    model = DistributedDataParallel(_model())
    return _train(model, torch.optim.AdamW(model.parameters()))


def accumulation() -> Any:
    """Data parallelism, with gradients accumulated over four batches."""
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(STEPS):
        with model.no_sync():
            for _ in range(3):
                model(_batch()).square().mean().backward()
        model(_batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_hand() -> Any:
    """Data parallelism by collectives in the program itself."""
    model = _model()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(_batch()).square().mean().backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for work in works:
            work.wait()
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def zero_by_hand() -> Any:
    """One flat parameter whose optimizer state is sharded by hand."""
    size = dist.get_world_size()
    model = _model()
    shards = [torch.zeros(p.numel() // size, requires_grad=True) for p in model.parameters()]
    optimizer = torch.optim.AdamW(shards)
    for _ in range(STEPS):
        model(_batch()).square().mean().backward()
        for parameter, shard in zip(model.parameters(), shards, strict=True):
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_tensor(shard.grad, parameter.grad.flatten())
            parameter.grad = None
        optimizer.step()
        for parameter, shard in zip(model.parameters(), shards, strict=True):
            dist.all_gather_into_tensor(parameter.data.view(-1), shard.detach())
    return model, optimizer


def ring() -> Any:
    """A ring of sends and receives: each rank sees every other rank's batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        batch = _batch()
        for _ in range(size):
            received = torch.empty_like(batch)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, batch, (rank + 1) % size),
                    dist.P2POp(dist.irecv, received, (rank - 1) % size),
                ]
            )
            model(batch).square().mean().backward()
            for work in works:
                work.wait()
            batch = received
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fsdp() -> Any:
    """FSDP2, block by block."""
    model = _model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return _train(model, torch.optim.AdamW(model.parameters()))


def fsdp_mixed() -> Any:
    """FSDP2 in bfloat16, gathered once per step."""
    model, policy = _model(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    return _train(model, torch.optim.AdamW(model.parameters()))


def fsdp_recomputed() -> Any:
    """FSDP2 with activation checkpointing."""
    model = _model()
    for block in model:
        fully_shard(block)
    fully_shard(model)

    def forward() -> torch.Tensor:
        batch = _batch()
        for block in model:
            batch = checkpoint(block, batch, use_reentrant=False)
        return batch

    # The root's hooks run in its own forward, which this one replaces.
    model.forward = lambda _: forward()  # type: ignore[method-assign]
    return _train(model, torch.optim.AdamW(model.parameters()))


def muon() -> Any:
    """FSDP2 with Muon: the last of its turns has one matrix for two ranks."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return _train(model, Muon(model.parameters()))


def tensor_parallel() -> Any:
    """Tensor parallelism by DTensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _model()
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _train(model, torch.optim.AdamW(model.parameters()))


def two_axes() -> Any:
    """FSDP2 over one axis, tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = _model()
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _train(model, torch.optim.AdamW(model.parameters()))


def _pipeline(schedule: Any, group: Any = None) -> Any:
    rank, size, count = dist.get_rank(group), dist.get_world_size(group), 8
    model = _model(1)

    def boundary(requires_grad: bool) -> torch.Tensor:
        return torch.empty(BATCH // count, WIDTH, device="meta", requires_grad=requires_grad)

    stage = PipelineStage(model, rank, size, torch.device("cpu"), boundary(rank > 0), boundary(True), group=group)
    driver = schedule(stage, count, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        inputs = (_batch(),) if rank == 0 else ()
        driver.step(*inputs, target=_batch() if rank == size - 1 else None)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def pipeline() -> Any:
    """A 1F1B pipeline of all ranks."""
    return _pipeline(Schedule1F1B)


def pipeline_by_data() -> Any:
    """Two pipelines of GPipe, each of half of the ranks."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "pp"))
    return _pipeline(ScheduleGPipe, mesh.get_group("pp"))


FOUR_RANKS = {program.__name__: program for program in (two_axes, pipeline, pipeline_by_data)}
PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (
        ddp,
        accumulation,
        by_hand,
        zero_by_hand,
        ring,
        fsdp,
        fsdp_mixed,
        fsdp_recomputed,
        muon,
        tensor_parallel,
    )
} | FOUR_RANKS
"""All of them, by name; those of `FOUR_RANKS` need four."""
