"""The parts of a parameter, of which FSDP takes two."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["lazy_chunks"]

_MODULE, _NAME = "torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty"


class _Chunks:
    """What `torch.chunk` gives, followed by empty tensors up to `num_chunks`; each is made when it is asked for.

    Args:
        tensor: What is cut.
        num_chunks: How many.
        dim: Along which dimension.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> torch.Tensor:
        if not 0 <= number < self._count:
            raise IndexError(number)
        whole = self._tensor.shape[self._dim]
        size = -(-whole // self._count)
        start = number * size
        if number and start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, whole - start))


@contextlib.contextmanager
def lazy_chunks() -> Iterator[None]:
    """Within it FSDP makes of a parameter's chunks, which are as many as ranks, only those that it looks at.

    Torch makes all of them, twice a parameter: on 1024 ranks that took nine tenths of a plan's time (2.11 to 2.13).
    """
    module: Any = importlib.import_module(_MODULE)
    before = getattr(module, _NAME, None)
    if before is None:
        yield
        return
    setattr(module, _NAME, _Chunks)
    try:
        yield
    finally:
        setattr(module, _NAME, before)
