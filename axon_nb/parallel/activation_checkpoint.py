"""Activation checkpointing: recompute a block's activations in backward instead of storing them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from axon_nb.errors import UsageError

ModuleKinds = type | tuple[type, ...] | Callable[[nn.Module], bool]
"""Selects modules: by class, or by a function called with each module."""


def matches(module: nn.Module, kinds: ModuleKinds) -> bool:
    """Whether `module` is selected by `kinds`."""
    if isinstance(kinds, type | tuple):
        return isinstance(module, kinds)
    return bool(kinds(module))


def checkpoint_blocks(model: nn.Module, kinds: ModuleKinds, *, every: int = 1, **options: Any) -> int:
    """Store only the inputs of these blocks for backward: less memory for about a third more time.

    Gradients are unchanged, even where random numbers are drawn. The blocks keep their places, classes and parameter
    names (torch's `checkpoint_wrapper` changes these). FSDP, DDP and tensor parallelism can be applied before or after.

    Args:
        model: The model; changed in place.
        kinds: The blocks, by class or by a function. Of nested blocks, the outer one is chosen.
        every: 1 selects all blocks, 2 every second one starting with the first, and so on.
        options: Options of `torch.utils.checkpoint.checkpoint`, such as `preserve_rng_state`.

    Returns:
        The number of checkpointed blocks.

    Raises:
        UsageError: no block matches, `every` is below 1, or a block is already checkpointed.
    """
    if every < 1:
        raise UsageError(f"every must be at least 1; got {every}. (1: all blocks, 2: every second one.)")
    blocks = _blocks(model, kinds)
    if not blocks:
        classes = ", ".join(sorted({type(inner).__name__ for inner in model.modules() if inner is not model}))
        raise UsageError(
            f"No module of {type(model).__name__} matches kinds={kinds!r}; it contains {classes or 'no modules'}."
        )
    selected = list(blocks.items())[::every]
    for name, block in selected:
        if "forward" in vars(block):
            raise UsageError(f"{name} already has its own forward; call checkpoint_blocks only once per block.")
    for _, block in selected:
        # Set on the instance, so that hooks such as FSDP's stay outside: a unit is gathered once for both forwards.
        vars(block)["forward"] = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    return len(selected)


def _blocks(module: nn.Module, kinds: ModuleKinds, prefix: str = "") -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        blocks |= {prefix + name: child} if matches(child, kinds) else _blocks(child, kinds, f"{prefix}{name}.")
    return blocks
