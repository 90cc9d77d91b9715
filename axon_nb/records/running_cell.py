"""Which notebook cell this process runs, for records that are made where nothing of a notebook is known."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["follow", "running_cell"]

_ask: list[Callable[[], int | None]] = []


def follow(ask: Callable[[], int | None]) -> None:
    """Have `ask` tell the number of the cell that runs, its `In [n]`; None while none does."""
    _ask[:] = [ask]


def running_cell() -> int:
    """The number of the cell that runs; 0 where there is none, as under torchrun."""
    return (_ask[0]() or 0) if _ask else 0
