"""Functions of cells on their way to another process: there they live in its namespace, as if defined in a cell of it.

cloudpickle would give each a private copy of the names it uses, and what later cells assign would not reach it.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator
from typing import Any

from IPython.core.getipython import get_ipython

__all__ = ["namespace", "reduce_function"]

_ATTRIBUTES = (
    "__name__",
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
    "__annotations__",
)


def namespace() -> dict[str, Any]:
    """The variables that this process's cells see; without IPython those of the main module."""
    shell = get_ipython()
    return vars(sys.modules["__main__"]) if shell is None else shell.user_ns


def reduce_function(function: types.FunctionType, *, with_names: bool = False) -> Any:
    """How a function whose globals are `namespace()` is made anew.

    Args:
        function: The function.
        with_names: Whether the global names that it uses go with it; they never replace a variable there.
    """
    cells = function.__closure__ or ()
    state = {
        "attributes": {name: getattr(function, name) for name in _ATTRIBUTES},
        "dict": dict(vars(function)),
        "closure": [_contents(cell) for cell in cells],
        "names": _used(function) if with_names else {},
    }
    return _function, (function.__code__, len(cells)), state, None, None, _set_function


def _used(function: types.FunctionType) -> dict[str, Any]:
    known = function.__globals__
    shells = getattr(get_ipython(), "user_ns_hidden", {})  # its own names, such as `get_ipython`
    names = dict.fromkeys(_global_names(function.__code__))
    return {name: known[name] for name in names if name in known and name not in shells}


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not bound yet
        return []


def _function(code: types.CodeType, num_cells: int) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in range(num_cells))
    return types.FunctionType(code, namespace(), code.co_name, None, cells)


def _set_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    for name, value in state["attributes"].items():
        setattr(function, name, value)
    vars(function).update(state["dict"])
    for cell, contents in zip(function.__closure__ or (), state["closure"], strict=True):
        if contents:
            cell.cell_contents = contents[0]
    for name, value in state["names"].items():
        function.__globals__.setdefault(name, value)
