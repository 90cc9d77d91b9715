"""A notebook's history: the cells that ran and the values sent to ranks, in order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field, to_builtins

from axon_nb.records.ranks import name_ranks

_UNDONE = re.compile(r"^Undid ((?:In \[\d+\](?:, )?)+): (ranks? [\d,-]+)", re.MULTILINE)


class SessionFacts(Struct, frozen=True):
    """Facts about the ranks that cells ran on."""

    num_ranks: int = 2
    """Number of ranks."""
    backend: str = "gloo"
    """``shm``, ``gloo`` or ``nccl``."""
    threads: int = 0
    """torch's intra-op threads per rank; 0 for usable cores / ranks, at least 1."""
    on_gpus: bool = False
    """Whether ranks compute on GPUs."""
    seed: int | None = None
    """Initial seed of torch's generator on each rank; None if unknown."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; the seed as text, as it may exceed JavaScript's exact integers."""
        return {**to_builtins(self), "seed": None if self.seed is None else str(self.seed)}


class ExecutedCell(Struct, frozen=True):
    """One executed cell."""

    number: int | None
    """The n of its prompt, In [n]; None if unknown."""
    magic: str
    """Its first line after %% if it ran on ranks, such as ``distributed --ranks 0``; otherwise empty."""
    code: str
    """Its code without that line."""
    outcome: str = "ok"
    """``ok``, ``failed`` or ``interrupted``."""
    failed_line: int | None = None
    """Line of `code`, from 1, at which the first rank failed; None if none failed or it is unknown."""
    error: str = ""
    """The exception in one line."""


class PushedValues(Struct, frozen=True):
    """Notebook variables that were sent to ranks."""

    names: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    """Receiving ranks; None for all."""
    scatter_dim: int | None = None
    """Dimension along which values were split over ranks; None if each rank got the full value."""
    literals: Mapping[str, str] = field(default_factory=dict)
    """Source text of simple values: numbers, strings and short containers of them."""


def without_undone(
    entries: Sequence[ExecutedCell | PushedValues], report: str, num_ranks: int
) -> list[ExecutedCell | PushedValues]:
    """Return what is left of a history after an undo.

    Args:
        entries: The history, oldest first.
        report: What `%distributed undo` said.
        num_ranks: If all ranks went back, the values that they received since did as well.
    """
    left = list(entries)
    for cells, ranks in _UNDONE.findall(report):
        end = len(left)
        for number in re.findall(r"\d+", cells):  # the latest first
            for at in reversed(range(end)):
                if isinstance(one := left[at], ExecutedCell) and one.magic and one.number == int(number):
                    del left[at]
                    end = at
                    break
        if ranks == name_ranks(range(num_ranks)):
            left[end:] = [one for one in left[end:] if isinstance(one, ExecutedCell)]
    return left
