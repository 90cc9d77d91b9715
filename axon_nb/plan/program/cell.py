"""A notebook cell as a program: its code, and the notebook's variables that it uses."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import CodeType
from typing import Any

import cloudpickle

from axon_nb.plan.errors import PlanError


class CellProgram:
    """Runs a cell's code with the names that cells have on ranks.

    Args:
        source: Python, without magics.
        file: What tracebacks call it.
        names: Variables that it uses.
        device: Type of the ranks' device.
    """

    def __init__(self, source: str, file: str, names: Mapping[str, Any], device: str) -> None:
        self._source, self._file, self._names, self._device = source, file, dict(names), device

    def __call__(self) -> dict[str, Any]:
        """Run it, and return its variables."""
        torch, dist = map(import_module, ("torch", "torch.distributed"))  # in the simulator only
        namespace = {
            "__name__": "__main__",
            "rank": dist.get_rank(),
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "world_size": dist.get_world_size(),
            "device": torch.device(self._device),
            "mesh": None,
            "dist": dist,
            "torch": torch,
            **self._names,
        }
        exec(compile(self._source, self._file, "exec"), namespace)
        return namespace


def cell_program(source: str, file: str, variables: Mapping[str, Any], device: str) -> CellProgram:
    """Make a program of a cell, with those variables of the notebook that it names.

    Args:
        source: Python, without magics.
        file: What tracebacks call it, such as ``In [5]``.
        variables: The variables of the notebook.
        device: Type of the ranks' device.

    Raises:
        PlanError: it has a syntax error, or uses a variable that cannot be sent to another process.
    """
    try:
        code = compile(source, file, "exec")
    except SyntaxError as error:
        raise PlanError(f"Line {error.lineno} of the cell: {error.msg}.") from error
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = {name: variables[name] for name in _names_in(code) if name in variables}
    for name, value in names.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise PlanError(
                f"The cell uses {name!r}, which cannot be sent to another process ({error}): make it in the cell."
            ) from error
    return CellProgram(source, file, names, device)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
