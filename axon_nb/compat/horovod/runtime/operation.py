"""One collective call on one rank: its arguments and its progress.

Messages about mismatching calls between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from axon_nb.comm import Handle, ProcessGroup
from axon_nb.records.ranks import name_ranks

__all__ = [
    "Begin",
    "Blueprint",
    "Call",
    "Operation",
    "deadlock_message",
    "described",
    "differing",
    "join_mismatch",
    "number_of",
]

Begin = Callable[[ProcessGroup, Sequence[int]], Handle]
"""Starts the transfer; takes the group and each rank's number of rows (size of dim 0)."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a joined rank needs to take part in an allreduce with zeros."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]
    """Kinds of device, such as ``cpu``."""
    op: int


@dataclass(slots=True, eq=False)
class Operation:
    """One call of one rank."""

    kind: str
    """The collective, such as ``allreduce``."""
    name: str
    """The call's name, the same on all ranks."""
    brings: str
    """Description of what must match on all ranks."""
    begin: Begin
    rows: int = 0
    """Size of dim 0 if ranks may differ in it."""
    blueprint: Blueprint | None = None
    """None if joined ranks cannot take part."""
    transfer: Handle | None = None
    """The running transfer; None before all ranks have called."""
    error: Exception | None = None
    """Why it failed."""
    key: int = field(init=False)
    signature: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = number_of(f"{self.kind}.{self.name}")
        self.signature = number_of(self.brings)

    @property
    def decided(self) -> bool:
        """Whether its transfer has started, or it has failed."""
        return self.transfer is not None or self.error is not None

    @property
    def over(self) -> bool:
        """Whether its result or error is available."""
        return self.error is not None or (self.transfer is not None and self.transfer.done())

    def result(self) -> Any:
        """Wait for the transfer and return the collective's result.

        Raises:
            Exception: the call failed.
        """
        if self.error is not None:
            raise self.error
        assert self.transfer is not None
        return self.transfer.wait()


def number_of(text: str) -> int:
    """Hash a text to 64 bits, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def described(tensors: Sequence[torch.Tensor], *, any_rows: bool = False) -> str:
    """Describe dtype, shape and device of tensors; with `any_rows` the size of dim 0 may differ."""
    return ", ".join(
        f"{tensor.dtype} of shape {_shape(tensor, any_rows)}" + ("" if tensor.is_cpu else f" on {tensor.device.type}")
        for tensor in tensors
    )


def _shape(tensor: torch.Tensor, any_rows: bool) -> str:
    sizes = ["any", *map(str, tensor.shape[1:])] if any_rows else list(map(str, tensor.shape))
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


Call = tuple[str, str, str]
"""Kind and name of a call, and a description of its arguments."""


def differing(ranks: Sequence[int], calls: Sequence[Call | None]) -> str | None:
    """Describe the first rank whose arguments differ from the first rank's; None if all match.

    Args:
        ranks: Global ranks of the members.
        calls: The call of each; None if it has joined.
    """
    there = [(rank, call) for rank, call in zip(ranks, calls, strict=True) if call is not None]
    first_rank, first = there[0]
    for rank, call in there:
        if call[2] != first[2]:
            return (
                f"{_named(first)}: rank {first_rank} passed {first[2]}, rank {rank} passed {call[2]}; arguments of "
                "collectives with the same name must match."
            )
    return None


def join_mismatch(ranks: Sequence[int], calls: Sequence[Call | None]) -> str:
    """Describe a collective in which joined ranks cannot take part."""
    call = next(call for call in calls if call is not None)
    joined = [rank for rank, theirs in zip(ranks, calls, strict=True) if theirs is None]
    who = name_ranks(joined)
    return (
        f"{_named(call)}: {who} called hvd.join(), and only allreduce works with joined ranks; give every rank the "
        "same number of batches, or use hvd.allreduce."
    )


def deadlock_message(ranks: Sequence[int], waiting: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Describe a deadlock in which all ranks wait.

    Args:
        ranks: Global ranks of the members.
        waiting: Kind and name of the incomplete calls of each.
    """
    parts = []
    for rank, calls in zip(ranks, waiting, strict=True):
        if not calls:
            parts.append(f"rank {rank} has joined")
            continue
        call = calls[0]
        absent = [other for other, theirs in zip(ranks, waiting, strict=True) if theirs and call not in theirs]
        who = f", which {name_ranks(absent)} did not call"
        parts.append(f"rank {rank} waits in {_named(call)}{who if absent else ''}")
    return f"Deadlock: {'; '.join(parts)}. Every rank must make the same calls with the same names."


def _named(call: Sequence[str]) -> str:
    kind, name = call[:2]
    return f"hvd.{kind}" if name.startswith("noname.") else f"hvd.{kind} {name!r}"
