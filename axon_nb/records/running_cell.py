"""Number of the notebook cell that this process runs, for code that knows nothing of notebooks."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["running_cell", "set_cell_source"]

_source: list[Callable[[], int | None]] = []


def set_cell_source(source: Callable[[], int | None]) -> None:
    """Use `source` to look up the running cell's number, its `In [n]`; it returns None when no cell runs."""
    _source[:] = [source]


def running_cell() -> int:
    """Number of the running cell; 0 if there is none, as under torchrun."""
    return (_source[0]() or 0) if _source else 0
