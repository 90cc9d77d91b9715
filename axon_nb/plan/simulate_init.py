"""Making models whose tensors have no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import init

__all__ = ["skip_init"]


@contextlib.contextmanager
def skip_init() -> Iterator[None]:
    """Within it the functions of `torch.nn.init` leave a tensor as it is.

    There are no values to set, and to fill a tensor without data takes as long as any operation on it; some, such as
    `orthogonal_`, would make other tensors for it.
    """
    fills = {name: value for name, value in vars(init).items() if name.endswith("_") and not name.startswith("_")}
    vars(init).update(dict.fromkeys(fills, _left_alone))
    try:
        yield
    finally:
        vars(init).update(fills)


def _left_alone(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor
