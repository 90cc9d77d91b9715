"""Skips weight initialization for models on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import init

__all__ = ["skip_init"]


@contextlib.contextmanager
def skip_init() -> Iterator[None]:
    """Inside, the functions of `torch.nn.init` return the tensor unchanged.

    There are no values to set, yet filling a fake tensor takes as long as any operation on it; some functions, such as
    `orthogonal_`, would allocate others.
    """
    fills = {name: value for name, value in vars(init).items() if name.endswith("_") and not name.startswith("_")}
    vars(init).update(dict.fromkeys(fills, _unchanged))
    try:
        yield
    finally:
        vars(init).update(fills)


def _unchanged(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor
