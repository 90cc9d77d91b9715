"""Import of a torchrun script as a notebook of `%%distributed` cells."""

from __future__ import annotations

import ast
import shlex
from dataclasses import dataclass
from pathlib import Path

from axon_nb.errors import UsageError
from axon_nb.script.cells import Cell, make_cells, write_notebook
from axon_nb.script.course import read_course

__all__ = ["ImportReport", "import_script"]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import wrote; its text is the summary shown to the user."""

    target: Path
    """The notebook."""
    cells: tuple[Cell, ...]
    """Its cells."""
    notes: tuple[str, ...]
    """What the user should know, one sentence each."""

    def __str__(self) -> str:
        count = sum(cell.on_ranks for cell in self.cells)
        head = f"Wrote {self.target}: {count} {'cell' if count == 1 else 'cells'} for ranks."
        return "\n".join([head, *self.notes])

    __repr__ = __str__


def import_script(
    source: Path, target: Path | None = None, *, arguments: str = "", force: bool = False
) -> ImportReport:
    """Cut a script into the cells of a notebook.

    Args:
        source: The script.
        target: The notebook; None: beside the script, with its name.
        arguments: The script's arguments, as in a shell.
        force: Whether to overwrite the notebook.

    Raises:
        UsageError: the script cannot be read or its arguments are wrong, or the notebook exists.
    """
    target = source.with_suffix(".ipynb") if target is None else target
    if source.suffix != ".py":
        raise UsageError(f"{source}: the script's name must end in .py.")
    if target.suffix != ".ipynb":
        raise UsageError(f"{target}: the notebook's name must end in .ipynb.")
    words = _words(arguments)
    try:
        code = source.read_text(encoding="utf-8")
        ast.parse(code)
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}.") from None
    except SyntaxError as error:
        raise UsageError(f"{source}, line {error.lineno}: {error.msg}.") from None
    except ValueError as error:  # not UTF-8, or null bytes
        raise UsageError(f"{source} is not a Python script: {error}.") from None
    course = read_course(code, source.name, words)
    if target.exists() and not force:
        raise UsageError(f"{target} already exists; use `--force` to overwrite it.")
    cells = make_cells(course, code, source=source.absolute(), folder=target.absolute().parent)
    write_notebook(target, cells)
    return ImportReport(target, tuple(cells), tuple(course.notes))


def _words(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise UsageError(f"--args: {error} in {arguments!r}.") from None
