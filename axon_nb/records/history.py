"""What a notebook has done, in order: the cells that ran, and the values that it sent to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PushedValues", "RanCell", "SessionFacts"]


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The ranks that cells ran on."""

    num_ranks: int = 2
    """Size of the world."""
    backend: str = "gloo"
    """``gloo`` or ``nccl``."""
    threads: int = 0
    """Intra-op threads of torch on each rank; 0: usable cores / ranks, at least 1."""
    on_gpus: bool = False
    """Whether ranks compute on GPUs."""
    seed: int | None = None
    """What torch's generator of each rank was seeded with at the start; None: not known."""

    def to_json(self) -> dict[str, Any]:
        """As plain values; the seed as text, for it may be larger than what JavaScript counts exactly."""
        return {**asdict(self), "seed": None if self.seed is None else str(self.seed)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> SessionFacts:
        """From what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        seed = None if told["seed"] is None else int(told["seed"])
        threads, on_gpus = int(told["threads"]), bool(told["on_gpus"])
        return cls(int(told["num_ranks"]), str(told["backend"]), threads, on_gpus, seed)


@dataclass(frozen=True, slots=True)
class RanCell:
    """One cell that has run."""

    number: int | None
    """Of its prompt, In [n]; None: not known."""
    magic: str
    """What is in its first line after %% if it ran on ranks, such as ``distributed --ranks 0``; empty: it did not."""
    code: str
    """Its code, without that line."""
    outcome: str = "ok"
    """``ok``, ``failed`` or ``interrupted``."""
    failed_line: int | None = None
    """The line of `code`, from 1, at which the first rank failed; None: it did not, or it is not known."""
    error: str = ""
    """What was raised, in one line."""


@dataclass(frozen=True, slots=True)
class PushedValues:
    """Variables of the notebook that were sent to ranks."""

    names: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    """None: all."""
    scattered_along: int | None = None
    """The dimension along which each rank got its own part; None: each got all."""
    literals: Mapping[str, str] = field(default_factory=dict)
    """Source text of the values that have one: numbers, texts, and short containers of them."""
