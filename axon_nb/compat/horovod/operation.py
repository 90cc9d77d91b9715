"""One collective on one rank: what it brings, and what has become of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from axon_nb.comm import Handle, ProcessGroup

__all__ = ["Begin", "Blueprint", "Operation", "described", "number_of"]

Begin = Callable[[ProcessGroup, Sequence[int]], Handle]
"""Begins the data's way: the group that carries it, and the rows (size of dim 0) that each of its ranks brings."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a rank that has joined needs to take part in an allreduce with zeros."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]
    """Kinds of device, such as ``cpu``."""
    op: int


@dataclass(slots=True, eq=False)
class Operation:
    """One call of one rank."""

    kind: str
    """What was called, such as ``allreduce``."""
    name: str
    """Under which name; the same on all ranks."""
    brings: str
    """What must be the same on all ranks, in words."""
    begin: Begin
    rows: int = 0
    """Size of dim 0, where ranks may differ in it."""
    blueprint: Blueprint | None = None
    """None: ranks that have joined cannot take part."""
    transfer: Handle | None = None
    """The data on its way; None before all ranks have called."""
    error: Exception | None = None
    """Why it will not be carried out."""
    key: int = field(init=False)
    signature: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = number_of(f"{self.kind}.{self.name}")
        self.signature = number_of(self.brings)

    @property
    def decided(self) -> bool:
        """Whether it is known to all ranks: its data is on its way, or it has failed."""
        return self.transfer is not None or self.error is not None

    @property
    def over(self) -> bool:
        """Whether its result, or its error, is there."""
        return self.error is not None or (self.transfer is not None and self.transfer.done())

    def result(self) -> Any:
        """Wait for the data; what the collective returns.

        Raises:
            Exception: it was not carried out.
        """
        if self.error is not None:
            raise self.error
        assert self.transfer is not None
        return self.transfer.wait()


def number_of(text: str) -> int:
    """A number that stands for a text on all ranks; 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def described(tensors: Sequence[torch.Tensor], *, any_rows: bool = False) -> str:
    """Dtype, shape and device of tensors in words; `any_rows`: the size of dim 0 may differ."""
    return ", ".join(
        f"{tensor.dtype} of shape {_shape(tensor, any_rows)}" + ("" if tensor.is_cpu else f" on {tensor.device.type}")
        for tensor in tensors
    )


def _shape(tensor: torch.Tensor, any_rows: bool) -> str:
    sizes = ["any", *map(str, tensor.shape[1:])] if any_rows else list(map(str, tensor.shape))
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
