"""`axon_nb.on_resize`: functions of the user that adapt what axon_nb cannot when the world changes its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from axon_nb.engine.session import current, own_rank
from axon_nb.errors import UsageError

ResizeFunction = Callable[[int, int], Any]
"""Called with the old and the new number of ranks."""
F = TypeVar("F", bound=ResizeFunction)


def on_resize(function: F) -> F:
    """Register a function that `%distributed resize` calls afterwards on all ranks, also on new ones. Use in a cell.

    It gets the old and the new number of ranks, and may communicate. A function replaces an
    earlier one of the same name, so a cell can run again. New ranks get the functions together with the variables.

    Args:
        function: Such as ``def rebuild_loader(old_size, new_size): …``.

    Returns:
        The function, so that this works as a decorator.

    Raises:
        UsageError: the argument is not a function, or this process is not a rank.
    """
    if not callable(function):
        raise UsageError(f"on_resize needs a function of the old and the new number of ranks; got {function!r}.")
    if own_rank() is None:
        raise UsageError("on_resize registers a function on ranks: call it in a `%%distributed` cell.")
    current().resize_functions[getattr(function, "__name__", repr(function))] = function
    return function


def call_functions(old_size: int, new_size: int) -> None:
    """Call the registered functions in the order of their registration; as a cell, on all ranks."""
    for function in list(current().resize_functions.values()):
        function(old_size, new_size)
