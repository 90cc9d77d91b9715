"""Published memory of training steps, and what `plan.memory` predicts for it."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from axon_nb import plan
from scripts.generated_page import ROOT
from scripts.published_models import MODELS, Block, Sizes, loss_of, model_of

PEAKS = ROOT / "docs" / "published" / "memory.csv"
NEAR = 0.10
"""Relative error of a prediction that counts as near."""
GB, GIB = 1e9, 1024.0**3


@dataclass(frozen=True)
class MemoryRow:
    """A published amount of memory, and the planner's."""

    source: str
    what: str
    published: float
    predicted: float
    unit: str

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1


class MixedPrecisionAdam(torch.optim.Optimizer):
    """Keeps the states that the ZeRO paper counts: 12 bytes per element in float32."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the states."""
        for group in self.param_groups:
            for parameter in group["params"]:
                for name in ("master", "momentum", "variance"):
                    self.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)


def linear_layers(num: int, rows: int, columns: int) -> nn.Module:
    """Return equal layers, as a model of `num` x `rows` x `columns` parameters."""
    return nn.Sequential(*(nn.Linear(columns, rows, bias=False) for _ in range(num)))


def zero_rows() -> list[MemoryRow]:
    """Return the model states of figure 1 of the ZeRO paper, without its stage 2, which torch does not have."""
    rows = []
    for name, strategy, published in (("", "ddp", 120.0), (", ZeRO-1", "optimizer_state", 31.4)):
        rows.append(MemoryRow("zero", f"model states of 7.5B on 64 GPUs{name}", published, _states(strategy), "GB"))
    rows.append(MemoryRow("zero", "model states of 7.5B on 64 GPUs, ZeRO-3", 1.88, _states("full_shard"), "GB"))
    return rows


def _states(strategy: str) -> float:
    found = plan.memory(
        partial(linear_layers, 750, 10_000, 1_000),
        64,
        strategy=strategy,
        inputs=plan.TensorSpec((1, 1_000)),
        optimizer=MixedPrecisionAdam,
        dtype="bfloat16",
        method="closed_form",
    )
    return found.worst.persistent.total / GB


class SelectiveBlock(nn.Module):
    """A block with torchtitan's selective checkpointing: attention and every second matrix product are kept."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.block = Block(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block; backward runs it again, without what was kept."""
        made: torch.Tensor = checkpoint(self.block, x, use_reentrant=False, context_fn=_contexts)
        return made


def _contexts() -> Any:
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = operation is torch.ops.aten.mm.default
        products[context.is_recompute] += is_product
        keeps = products[context.is_recompute] % 2 == 1 if is_product else "scaled_dot_product" in str(operation)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _FusedLoss(torch.autograd.Function):
    """Cross-entropy that keeps the logits and writes their gradient, as `torch.compile` fuses it."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(logits, target)
        return logits[:, 0].float().sum()

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(context.saved_tensors[0]), None


def fused_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a number whose backward allocates what that of a fused cross-entropy does."""
    made: torch.Tensor = _FusedLoss.apply(logits.flatten(0, 1), target.flatten())
    return made


def _selective(sizes: Sizes) -> nn.Module:
    return model_of(sizes, SelectiveBlock)


def peak_rows() -> list[MemoryRow]:
    """Return published peaks of whole training steps: torchtitan logs the memory that the allocator reserves."""
    with PEAKS.open() as file:
        rows = list(csv.DictReader(file))
    return [MemoryRow(row["source"], _what(row), float(row["gib"]), _peak_gib(row), "GiB") for row in rows]


def _what(row: Mapping[str, str]) -> str:
    tokens = f"{row['batch']} x {row['seq']} tokens"
    split = f" over {row['cp']} of them" if row["cp"] != "1" else ""
    return f"{row['model']} on {row['gpus']} GPUs, {tokens}{split}, {row['recompute']} AC, {row['run']}"


def _peak_gib(row: Mapping[str, str]) -> float:
    tokens, cp = plan.TensorSpec((int(row["batch"]), "seq"), "int64"), int(row["cp"])
    selective = row["recompute"] == "selective"
    found = plan.memory(
        partial(_selective if selective else model_of, MODELS[row["model"]]),
        mesh={"dp": int(row["gpus"]) // cp, "cp": cp},
        seq=int(row["seq"]),
        inputs=tokens,
        target=tokens,
        loss=fused_loss if row["loss"] == "fused" else loss_of,
        mixed_precision="bfloat16",
        wrap="SelectiveBlock" if selective else "Block",
        activation_checkpointing=None if selective else "Block",
    )
    return found.reserved_bytes / GIB
