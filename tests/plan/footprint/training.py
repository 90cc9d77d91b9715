"""The same models and training steps, as plan requests and on real ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from axon_nb.comm import World
from axon_nb.parallel import (
    DDP,
    FSDP,
    Parallel3D,
    Pipeline,
    ShardingStrategy,
    checkpoint_blocks,
    make_mesh,
    parallelize,
)
from axon_nb.parallel.memory import optimizer_states
from axon_nb.parallel.models import GPT, Block, GPTConfig, next_byte_loss
from axon_nb.plan.footprint.plan import MemoryRequest
from tests.plan.footprint.allocator import allocated
from tests.support.training.both import Both

CONFIG = GPTConfig(vocab=509, context=64, hidden=192, heads=4, blocks=3)
"""The vocabulary is prime, so no number of ranks divides it."""
BATCH = 8
Steps = tuple[Callable[[], None], Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """One way to train the model."""

    mesh: tuple[tuple[str, int], ...]
    strategy: str = "full_shard"
    dtype: str | None = None
    mixed: str | None = None
    again: bool = False
    optimizer: str = "Adam"
    schedule: str = "1F1B"
    num_microbatches: int | None = None
    keep_whole: bool = False

    @property
    def world(self) -> int:
        """Ranks."""
        return math.prod(size for _, size in self.mesh)

    def request(self, **more: Any) -> MemoryRequest:
        """The request of a plan."""
        return MemoryRequest(
            CONFIG,
            dict(self.mesh),
            self.strategy,
            optimizer=self.optimizer.lower(),
            dtype=self.dtype,
            mixed_precision=self.mixed,
            activation_checkpointing=Block if self.again else None,
            batch=BATCH,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            tp_plan=layers() if {"pp", "tp"} <= dict(self.mesh).keys() else "auto",
            device="cpu",
            keep_whole=self.keep_whole,
            **more,
        )


def layers() -> dict[str, Any]:
    """The layers that tp shards in a pipeline."""
    return {"block*.up": ColwiseParallel(), "block*.down": RowwiseParallel()}


def measured(world: World, case: Case) -> dict[str, Any]:
    """Train it on this rank, and measure a step."""
    return allocated(lambda: _made(world, case), warm_ups=1 if case.strategy not in ("ddp", "optimizer_state") else 2)


def _made(world: World, case: Case) -> Steps:
    torch.manual_seed(0)
    model: Any = GPT(CONFIG)
    if case.dtype is not None:
        model = model.to(getattr(torch, case.dtype))
    if case.again:
        checkpoint_blocks(model, Block)
    tokens = torch.randint(0, CONFIG.vocab, (BATCH, CONFIG.context))
    targets = torch.randint(0, CONFIG.vocab, (BATCH, CONFIG.context))
    if "pp" in dict(case.mesh):
        return _in_stages(model, case, tokens, targets)
    wrapped, optimizer = _wrapped(world, model, case)
    casts = case.mixed is not None and case.strategy in ("ddp", "optimizer_state")

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if casts else contextlib.nullcontext():
            loss = next_byte_loss(wrapped(tokens), targets)
        loss.backward()
        optimizer.step()

    return step, _between(model, optimizer)


def _wrapped(world: World, model: nn.Module, case: Case) -> tuple[Any, Any]:
    make: Any = getattr(torch.optim, case.optimizer)
    if case.strategy == "ddp":
        ddp = DDP(model, world)
        return ddp, make(ddp.parameters())
    axes = dict(case.mesh)
    if axes.keys() == {"tp"}:
        parallelize(model, "auto", mesh=world)
        return model, make(model.parameters())
    mesh = make_mesh(device="cpu", **axes) if len(axes) > 1 else None
    if mesh is not None and "tp" in axes:
        parallelize(model, "auto", mesh=mesh["tp"])
        mesh = mesh["dp"]
    mixed = getattr(torch, case.mixed) if case.mixed and case.strategy != "optimizer_state" else None
    group = None if mesh is not None else world
    options: Any = {"strategy": ShardingStrategy(case.strategy), "keep_whole": case.keep_whole}
    sharded = FSDP(model, group, mesh=mesh, mixed_precision=mixed, **options)
    return sharded, Both(sharded) if case.optimizer == "Muon" else sharded.optimizer(make)


def _in_stages(model: nn.Sequential, case: Case, tokens: torch.Tensor, targets: torch.Tensor) -> Steps:
    mesh = make_mesh(device="cpu", **dict(case.mesh))
    options: Any = {"num_microbatches": case.num_microbatches, "schedule": case.schedule, "loss": next_byte_loss}
    piped: Any
    if mesh.ndim == 1:
        piped = Pipeline.split(model, group=mesh, **options)
    else:
        mixed = None if case.mixed is None else getattr(torch, case.mixed)
        again = case.strategy == "full_shard"
        cut = layers() if "tp" in dict(case.mesh) else None
        piped = Parallel3D(model, mesh, tp_plan=cut, mixed_precision=mixed, reshard_after_forward=again, **options)
    del model
    optimizer = getattr(torch.optim, case.optimizer)(piped.parameters())

    def step() -> None:
        piped.step(tokens, targets)
        optimizer.step()

    return step, _between(piped, optimizer)


def _between(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], tuple[int, int, int]]:
    def between() -> tuple[int, int, int]:
        parameters = list(model.parameters())
        three = (
            _storages(parameters),
            _storages([p.grad for p in parameters if p.grad is not None]),
            _storages(optimizer_states(optimizer)),
        )
        optimizer.zero_grad()
        return three

    return between


def _storages(tensors: list[Any]) -> int:
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
