"""Captures models wrapped in every way, in a process with its own fake world."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.parallel import DistributedDataParallel

from axon_nb.parallel import FSDP, checkpoint_blocks
from axon_nb.parallel.models import GPT, Block, GPTConfig
from axon_nb.plan.footprint.fake_world import fake_world, mesh_of
from axon_nb.plan.skeleton import capture


def plain() -> GPT:
    """Make the model, unwrapped."""
    model = GPT(GPTConfig(vocab=67, context=8, hidden=16, heads=2, blocks=2))
    model.head.logits.weight = model.embedding.token.weight  # type: ignore[union-attr, assignment]
    model.register_buffer("steps", torch.zeros(3, dtype=torch.int32))
    model.block1.requires_grad_(False)  # type: ignore[operator]
    return model


def described(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Describe everything of a model except values."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, item in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        found[name] = tuple(item.shape), str(item.dtype), item.requires_grad, type(item).__name__
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        found[f"{name} itself"] = type(module).__name__, type(module).__module__, hooks, sorted(vars(module))
    found["tied"] = (model.head.logits.weight is model.embedding.token.weight,)  # type: ignore[union-attr]
    return found


def _sharded(axes: dict[str, int]) -> nn.Module:
    mesh, model = mesh_of(axes), plain()
    if "tp" in axes:
        parallelize_module(
            model,
            mesh["tp"],
            {
                "block*.up": ColwiseParallel(),
                "block*.down": RowwiseParallel(),
                "block*.norm1": PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True
                ),
            },
        )
    for name in ("block0", "block1"):
        fully_shard(model.get_submodule(name), mesh=mesh["dp"] if len(axes) > 1 else mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return fully_shard(model, mesh=mesh["dp"] if len(axes) > 1 else mesh, mp_policy=policy)


def _unsharded() -> nn.Module:
    """Make a model whose parameters FSDP2 has gathered, in the dtype that it computes in."""
    model: Any = _sharded({"dp": 4})
    for block in (model.block0, model.block1, model):
        block.unshard()
    return model


def _checkpointed() -> nn.Module:
    model = plain()
    checkpoint_blocks(model, Block)
    return FSDP(model, mesh=mesh_of({"dp": 4}), sync_parameters=False)


WAYS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "fully_shard": lambda: _sharded({"dp": 4}),
    "unsharded": _unsharded,
    "two axes": lambda: _sharded({"dp": 2, "tp": 2}),
    "ddp": lambda: DistributedDataParallel(plain(), init_sync=False),
    "FSDP": lambda: FSDP(plain(), mesh=mesh_of({"dp": 4}), sync_parameters=False),
    "checkpointed": _checkpointed,
}


def seen(task: Any, report: Callable[[float, str], None]) -> dict[str, tuple[dict[str, Any], tuple[int, ...]]]:
    """Capture each model: its description, and its output's shape."""
    found = {}
    for name, make in WAYS.items():
        with fake_world(0, 4):
            captured = capture(make())
        model = pickle.loads(captured.factory)()
        found[name] = described(model), tuple(model(torch.zeros(2, 8, dtype=torch.int64)).shape)
    return found
