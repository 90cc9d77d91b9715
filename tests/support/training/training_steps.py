"""Training steps of every layout on real ranks, and the options of the plan of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from axon_nb.parallel import (
    DDP,
    FSDP,
    Parallel3D,
    Pipeline,
    ShardingStrategy,
    axis_group,
    coordinates,
    make_mesh,
    parallel_cross_entropy,
    parallelize,
)
from axon_nb.parallel.models import GPT, Block, GPTConfig, next_byte_loss
from tests.support.training.both import Both

CONFIG = GPTConfig(vocab=32, context=8, hidden=16, heads=4, blocks=3)
BATCH = 8

_LAYERS = {"block*.up": "column", "block*.down": "row"}
Step = Callable[[], object]


def gpt() -> GPT:
    """Make the same model on all ranks."""
    torch.manual_seed(0)
    return GPT(CONFIG)


def odd() -> nn.Sequential:
    """Make a model with indivisible sizes, buffers, and a frozen layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.BatchNorm1d(11), nn.ReLU(), nn.Linear(11, 7), nn.Linear(7, 3))
    model[3].requires_grad_(False)
    return model


def tokens() -> torch.Tensor:
    """A batch."""
    return torch.zeros(BATCH, CONFIG.context, dtype=torch.int64)


def rows() -> torch.Tensor:
    """Make a batch for the odd model."""
    return torch.ones(BATCH, 6)


def _training(model: Any, loss_of: Callable[[], torch.Tensor], optimizer: Any = None) -> Step:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


def _data(wrap: Callable[[nn.Module, Any], Any], model: Callable[[], nn.Module], batch: Any) -> Callable[[Any], Step]:
    def make(mesh: Any) -> Step:
        wrapped = wrap(model(), mesh)
        made = wrapped.optimizer(torch.optim.SGD, lr=0.01) if isinstance(wrapped, FSDP) else None
        return _training(wrapped, lambda: wrapped(batch()).float().sum(), made)

    return make


def _with_muon(mesh: Any) -> Step:
    axes, model = mesh.mesh_dim_names, gpt()
    if "tp" in axes:
        parallelize(model, _LAYERS, mesh=mesh["tp"])
    wrapped = FSDP(model, mesh=mesh["dp"]) if "dp" in axes else model
    return _training(wrapped, lambda: next_byte_loss(wrapped(tokens()), tokens()), Both(wrapped))


def _fsdp(strategy: str, **options: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda model, mesh: FSDP(model, mesh=mesh, strategy=ShardingStrategy(strategy), **options)


def _no_shard(model: nn.Module, mesh: Any) -> Any:
    return FSDP(model, axis_group(mesh, "dp"), strategy=ShardingStrategy.NO_SHARD)


def _ddp(**options: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda model, mesh: DDP(model, mesh, **options)


def _tensor(*, sequence: bool = False, plan: Any = "auto", adam: bool = False) -> Callable[[Any], Step]:
    def make(mesh: Any) -> Step:
        model = gpt()
        parallelize(model, plan, mesh=mesh["tp"], sequence=sequence, parallel_loss=sequence)
        loss = parallel_cross_entropy if sequence else next_byte_loss
        group = {"group": axis_group(mesh, "tp")} if sequence else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if adam else None
        return _training(model, lambda: loss(model(tokens()), tokens(), **group), optimizer)

    return make


def _pipeline(schedule: str, stages: int, num_microbatches: int) -> Callable[[Any], Step]:
    def make(mesh: Any) -> Step:
        pipe = Pipeline.split(
            gpt(),
            group=axis_group(mesh, "pp"),
            schedule=schedule,
            num_stages=stages,
            num_microbatches=num_microbatches,
            loss=next_byte_loss,
        )
        return lambda: pipe.step(tokens(), tokens())

    return make


def _three_d(mesh: Any) -> Step:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {"block*.up": ColwiseParallel(), "block*.down": RowwiseParallel()} if "tp" in mesh.mesh_dim_names else None
    model = Parallel3D(gpt(), mesh, tp_plan=styles, num_microbatches=4, loss=next_byte_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model.step(tokens(), tokens())
        optimizer.step()

    return step


@dataclass(frozen=True)
class Case:
    """A layout."""

    mesh: dict[str, int]
    make: Callable[[Any], Step]
    """Makes a step from the mesh."""
    model: Callable[[], nn.Module] = gpt
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the plan."""

    @property
    def ranks(self) -> int:
        """World size."""
        count = 1
        for size in self.mesh.values():
            count *= size
        return count

    def plan(self) -> Any:
        """Predict the communication."""
        from axon_nb import plan

        of_gpt = self.model is gpt
        defaults: dict[str, Any] = {"inputs": tokens() if of_gpt else rows(), "device": "cpu", "optimizer": "SGD"}
        if self.mesh.keys() & {"tp", "pp"}:
            defaults |= {"target": tokens(), "loss": next_byte_loss}
        return plan.communication(self.model, mesh=self.mesh, **(defaults | self.options))


_PLAN = {"block*.up": "column", "block*.down": "row", "head.logits": "column+gather"}
_SEQUENCE = {"sequence": True, "parallel_loss": True}
CASES = {
    "ddp": Case({"dp": 2}, _data(_ddp(), gpt, tokens), options={"strategy": "ddp"}),
    "ddp, small buckets": Case(
        {"dp": 2}, _data(_ddp(bucket_size_mb=0.004), gpt, tokens), options={"strategy": "ddp", "bucket_size_mb": 0.004}
    ),
    "ddp, buffers": Case(
        {"dp": 2},
        _data(_ddp(bucket_size_mb=0.0001), odd, rows),
        odd,
        {"strategy": "ddp", "bucket_size_mb": 0.0001},
    ),
    "zero-1": Case({"dp": 2}, _data(_fsdp("optimizer_state"), gpt, tokens), options={"strategy": "optimizer_state"}),
    "full_shard": Case({"dp": 2}, _data(_fsdp("full_shard"), gpt, tokens), options={"strategy": "full_shard"}),
    "full_shard, odd": Case({"dp": 2}, _data(_fsdp("full_shard"), odd, rows), odd),
    "full_shard, blocks in bfloat16": Case(
        {"dp": 2},
        _data(_fsdp("full_shard", wrap=Block, mixed_precision=torch.bfloat16), gpt, tokens),
        options={"wrap": Block, "mixed_precision": torch.bfloat16},
    ),
    "full_shard, Muon": Case({"dp": 2}, _with_muon, options={"optimizer": "Muon"}),
    "tp, Muon": Case({"tp": 2}, _with_muon, options={"optimizer": "Muon", "tp_plan": _LAYERS}),
    "dp x tp, Muon": Case({"dp": 2, "tp": 2}, _with_muon, options={"optimizer": "Muon", "tp_plan": _LAYERS}),
    "shard_grad_op": Case({"dp": 2}, _data(_fsdp("shard_grad_op"), gpt, tokens), options={"strategy": "shard_grad_op"}),
    "no_shard": Case({"dp": 2}, _data(_no_shard, gpt, tokens), options={"strategy": "no_shard"}),
    "tp": Case({"tp": 2}, _tensor()),
    "tp, sequence": Case({"tp": 2}, _tensor(sequence=True), options=_SEQUENCE),
    "tp, sequence, AdamW": Case(
        {"tp": 2}, _tensor(sequence=True, adam=True), options=_SEQUENCE | {"optimizer": "AdamW"}
    ),
    "tp, by patterns": Case({"tp": 2}, _tensor(plan=_PLAN), options={"tp_plan": _PLAN}),
    "gpipe": Case({"pp": 2}, _pipeline("GPipe", 2, 4), options={"schedule": "GPipe", "num_microbatches": 4}),
    "1f1b": Case({"pp": 2}, _pipeline("1F1B", 2, 2), options={"num_microbatches": 2}),
    "interleaved": Case(
        {"pp": 2},
        _pipeline("Interleaved1F1B", 4, 4),
        options={"schedule": "Interleaved1F1B", "num_microbatches": 4},
    ),
    "zero bubble": Case(
        {"pp": 2}, _pipeline("ZBVZeroBubble", 4, 4), options={"schedule": "ZBVZeroBubble", "num_microbatches": 4}
    ),
    "hybrid_shard": Case(
        {"replicate": 2, "shard": 2}, _data(_fsdp("hybrid_shard"), gpt, tokens), options={"strategy": "hybrid_shard"}
    ),
    "zero-1 on 4": Case({"dp": 4}, _data(_fsdp("optimizer_state"), odd, rows), odd, {"strategy": "optimizer_state"}),
    "full_shard on 4": Case({"dp": 4}, _data(_fsdp("full_shard"), odd, rows), odd),
    "pp x dp": Case({"pp": 2, "dp": 2}, _three_d, options={"num_microbatches": 4}),
    "pp x tp": Case(
        {"pp": 2, "tp": 2},
        _three_d,
        options={"num_microbatches": 4, "tp_plan": _LAYERS},
    ),
    "pp x dp x tp": Case(
        {"pp": 2, "dp": 2, "tp": 2},
        _three_d,
        options={"num_microbatches": 4, "tp_plan": _LAYERS},
    ),
}
"""The cases, by name."""


@dataclass(frozen=True)
class Prepared:
    """A layout on this rank after warm-up: buckets are built, shapes agreed on."""

    step: Step
    axes: dict[str, str]
    """Axis and size by the group's name."""
    pp_rank: int
    """This rank's coordinate along ``pp``."""
    mesh: Any


def prepare(name: str) -> Prepared:
    """Build a case on this rank and take two steps."""
    case = CASES[name]
    mesh = make_mesh(device="cpu", **case.mesh)
    step = case.make(mesh)
    step()
    step()
    axes = {mesh.get_group(axis).group_name: axis for axis in case.mesh}
    return Prepared(step, axes, coordinates(mesh).get("pp", 0), mesh)
