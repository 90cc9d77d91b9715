"""Being told that backward has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["before_backward"]


def before_backward(output: Any, call: Callable[[], None]) -> None:
    """Have `call` made when backward reaches the output; at once when it holds no tensor that torch's tools find."""
    roots = {leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn}
    for root in roots:
        root.register_prehook(lambda gradients: call())
    if not roots:
        call()
