"""Run a function when backward starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["on_backward_start"]


def on_backward_start(output: Any, call: Callable[[], None]) -> None:
    """Call `call` when backward reaches `output`, or at once if `output` contains no tensor with a gradient."""
    roots = {leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn}
    for root in roots:
        root.register_prehook(lambda gradients: call())
    if not roots:
        call()
