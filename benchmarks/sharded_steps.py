"""The same training step twice: with `axon_nb.parallel`, and written with torch alone. Runs on ranks under torchrun."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from axon_nb.parallel import FSDP, ShardingStrategy, checkpoint_blocks
from axon_nb.parallel.models import GPT, Block, GPTConfig, next_byte_loss, windows

CASES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "OPTIMIZER_STATE", "bfloat16", "checkpointed")
Step = Callable[[], None]


def make(arm: str, case: str, *, tiny: bool = False) -> Step:
    """Create a training step: forward, backward, clipping, Adam. Collective.

    Args:
        arm: ``ours`` or ``torch``.
        case: One of `CASES`.
        tiny: Whether to use a model of a few kilobytes.
    """
    config = GPTConfig(context=64, hidden=16, blocks=1) if tiny else GPTConfig(context=64, hidden=256, blocks=6)
    torch.manual_seed(0)
    gpt = GPT(config)
    text = torch.randint(256, (4096,), dtype=torch.uint8)
    inputs, targets = windows(text, batch=8, seq=64)
    model, optimizer, clip = (_ours if arm == "ours" else _torch)(gpt, case)

    def step() -> None:
        optimizer.zero_grad()
        next_byte_loss(model(inputs).float(), targets).backward()
        clip()
        optimizer.step()

    return step


Parts = tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]


def _ours(gpt: GPT, case: str) -> Parts:
    if case == "checkpointed":
        checkpoint_blocks(gpt, Block)
    strategy = ShardingStrategy[case] if case in ShardingStrategy.__members__ else ShardingStrategy.FULL_SHARD
    model = FSDP(gpt, strategy=strategy, mixed_precision=torch.bfloat16 if case == "bfloat16" else None)
    return model, model.optimizer(torch.optim.Adam, lr=1e-3), lambda: model.clip_grad_norm(1.0)


def _torch(gpt: GPT, case: str) -> Parts:
    if case == "OPTIMIZER_STATE":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        wrapped = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
        zero = ZeroRedundancyOptimizer(
            wrapped.parameters(), optimizer_class=torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-3
        )
        return wrapped, zero, lambda: float(nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0))
    if case == "checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            apply_activation_checkpointing,
        )

        apply_activation_checkpointing(gpt, check_fn=lambda module: isinstance(module, Block))
    whole = case in ("SHARD_GRAD_OP", "NO_SHARD")
    shape = (dist.get_world_size(), 1) if case == "NO_SHARD" else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case == "bfloat16" else MixedPrecisionPolicy()
    for child in gpt.children():
        fully_shard(child, mesh=mesh, reshard_after_forward=not whole, mp_policy=policy)
    fully_shard(gpt, mesh=mesh, reshard_after_forward=False if whole else None, mp_policy=policy)

    def clip() -> float:
        norm = nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    return gpt, torch.optim.Adam(gpt.parameters(), lr=1e-3), clip
