"""A training of several kinds of models, of which ranks die at chosen places. Sent to the ranks as a cell."""

from __future__ import annotations

import hashlib
import os
import random
import signal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

rank = dist.get_rank()
losses: list[float] = []
schedule = None


class Best:
    """The lowest loss so far, as an attribute."""

    loss = 0.0


best = Best()


def block() -> nn.Sequential:
    """One of the blocks of all models."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 16))


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return (output - target).square().mean()


def build(kind: str) -> None:
    """Make the model, its optimizer and its scheduler."""
    global model, optimizer, decay, schedule, mesh, draws, table, latest
    torch.manual_seed(0)
    whole = nn.Sequential(*(block() for _ in range(4)))
    layers = {f"{i}.{n}": style() for i in range(4) for n, style in (("0", ColwiseParallel), ("3", RowwiseParallel))}
    schedule = None
    if kind in ("ddp", "zero"):
        model = DistributedDataParallel(whole)
    elif kind == "fsdp":
        model = whole
        for part in (*model, model):
            fully_shard(part)
    elif kind == "tensor":
        model = parallelize_module(whole, init_device_mesh("cpu", (4,)), layers)
    elif kind == "grid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = parallelize_module(whole, mesh["tensor"], layers)
        for part in (*model, model):
            fully_shard(part, mesh=mesh["data"])
    elif kind == "three_d":
        from axon_nb.parallel import Parallel3D, make_mesh

        plan = {f"*.{n}": style() for n, style in (("0", ColwiseParallel), ("3", RowwiseParallel))}
        model = Parallel3D(whole, make_mesh(pp=2, tp=2), tp_plan=plan, num_microbatches=2, loss=square)
    else:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        model = whole[rank]
        schedule = Schedule1F1B(PipelineStage(model, rank, 4, torch.device("cpu")), 4, loss_fn=square)
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # four ranks take 5 s of CPU time to import it

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    torch.manual_seed(0 if kind in ("tensor", "grid", "three_d") else rank)
    random.seed(0)
    np.random.seed(0)
    draws, table = np.random.default_rng(0), np.arange(6.0).reshape(2, 3)
    losses.clear()
    best.loss, latest = 1e9, ()


def kill(*_: object) -> None:
    """Die as the out-of-memory killer would have it."""
    os.kill(os.getpid(), signal.SIGKILL)


def forward(x: torch.Tensor) -> float:
    """Forward and backward."""
    if hasattr(model, "step"):
        several = model.step(x, x)
        return 0.0 if several is None else several.sum().item()
    if schedule is None:
        loss = square(model(x), x)
        loss.backward()
        return loss.item()
    parts: list[torch.Tensor] = []
    schedule.step(*([x] if rank == 0 else []), **({"target": x, "losses": parts} if rank == 3 else {}))
    return sum(part.item() for part in parts)


def train(until: int, place: str = "", at: int = 0) -> None:
    """Train until so many losses are there; die at a place of the step after `at` losses."""
    global latest
    while len(losses) < until:
        if place == "step" and len(losses) == at:
            optimizer.register_step_pre_hook(kill)
        if place == "save" and len(losses) == at:
            from axon_nb.engine.protection.slots import SlotMemory

            SlotMemory.publish = kill
        table[:] += draws.random()
        loss = forward(torch.randn(8, 16) * (random.random() + np.random.rand() + table.mean()))
        if place == "between" and len(losses) == at:
            kill()
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        losses.append(loss)
        best.loss, latest = min(best.loss, loss), (len(losses), loss)


def state() -> tuple[object, ...]:
    """Losses, learning rate, what the loop notes, and a digest of this rank's weights and moments."""
    digest = hashlib.sha256()
    moments = [moment for entry in getattr(optimizer, "optim", optimizer).state.values() for moment in entry.values()]
    for tensor in (*model.parameters(), *moments):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().numpy().tobytes())
    return losses, optimizer.param_groups[0]["lr"], best.loss, latest, digest.hexdigest()
