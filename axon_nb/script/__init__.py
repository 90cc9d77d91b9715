"""Import of a torchrun script as a notebook of `%%distributed` cells."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from axon_nb.errors import UsageError
from axon_nb.export.effects import called_name
from axon_nb.export.translation import packages_in
from axon_nb.script.course import Block, Course, read_course

__all__ = ["ImportReport", "import_script"]

_MAX_DEFINITIONS = 60
"""Lines of a cell after which the next definition begins another one."""
_TRAINS = re.compile(r"(train|fit|run|main)(_\w+)?|\w+_(train|main|loop)")
_START = "%load_ext axon_nb\n%distributed start"


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


class Cell(Struct, frozen=True):
    """A cell of the notebook."""

    kind: str
    """``text``, ``start``, ``imports``, ``settings``, ``definitions``, ``set-up`` or ``loop``."""
    text: str
    """Its source."""

    @property
    def on_ranks(self) -> bool:
        """Whether it runs on ranks."""
        return self.kind not in ("text", "start")


def make_cells(course: Course, code: str, *, source: Path, folder: Path) -> list[Cell]:
    """Group the statements of a script.

    Args:
        course: The statements.
        code: The script's text.
        source: The script, as an absolute path.
        folder: The folder of the notebook, as an absolute path.
    """
    blocks = list(course.blocks)
    title, first = f"# {source.stem}", blocks[0].node if blocks else None
    if _is_text(first):
        title += f"\n\n{_text(first)}"
        blocks = blocks[1:]
    place = sum(isinstance(block.node, ast.ImportFrom) and block.node.module == "__future__" for block in blocks)
    blocks[place:place] = [Block.parse(line) for line in _head(code, source, folder)]
    cells = [Cell("text", f"{title}\n\nImported from `{source.name}`."), Cell("start", _START)]
    kind, together = "", list[Block]()
    for block, this in zip(blocks, _kinds(blocks, course), strict=True):
        size = sum(other.text.count("\n") + 2 for other in (*together, block))
        if this != kind or this == "text" or (this == "definitions" and size > _MAX_DEFINITIONS):
            cells += _joined(kind, together)
            kind, together = this, []
        together.append(block)
    return [*cells, *_joined(kind, together)]


def _kinds(blocks: Sequence[Block], course: Course) -> list[str]:
    """The kind of cell that each statement belongs to."""
    kinds = ["settings" if id(block) in course.settings else _kind(block) for block in blocks]
    for index, kind in enumerate(kinds[1:]):
        if kind == "settings" and ast.unparse(blocks[index].node) in ("import argparse", "import sys"):
            kinds[index] = "settings"
    return kinds


def _head(code: str, source: Path, folder: Path) -> list[str]:
    """Statements that a cell needs to find what the script finds."""
    lines = []
    tops = packages_in(ast.parse(code))
    beside = any((source.parent / f"{top}.py").is_file() or (source.parent / top).is_dir() for top in tops)
    if beside and source.parent != folder:
        lines += ["import sys", f"sys.path.insert(0, {str(source.parent)!r})"]
    if re.search(r"\b__file__\b", code):
        lines.append(f"__file__ = {str(source)!r}")
    return lines


def _joined(kind: str, blocks: Sequence[Block]) -> list[Cell]:
    if not blocks:
        return []
    if kind == "text":
        return [Cell(kind, _text(blocks[0].node))]
    code = blocks[0].text
    for block in blocks[1:]:
        code += "\n\n\n" if kind == "definitions" else "\n\n" if block.is_apart else "\n"
        code += block.text
    return [Cell(kind, f"%%distributed\n{code}")]


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _text(node: ast.stmt | None) -> str:
    assert isinstance(node, ast.Expr)
    assert isinstance(node.value, ast.Constant)
    return str(node.value.value).strip()


def _kind(block: Block) -> str:
    node = block.node
    if _is_text(node):
        return "text"
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "imports"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return "definitions"
    if isinstance(node, (ast.For, ast.While, ast.With)) and ("step(" in block.text or "train" in block.text):
        return "loop"
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call):
        return "loop" if _TRAINS.fullmatch(called_name(value)) else "set-up"
    return "set-up"


def write_notebook(path: Path, cells: Sequence[Cell]) -> None:
    """Write a notebook of nbformat 4.5 without outputs.

    Raises:
        UsageError: the file cannot be written.
    """
    content = {
        "cells": [_to_json(cell, number) for number, cell in enumerate(cells)],
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    try:
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}.") from None


def _to_json(cell: Cell, number: int) -> dict[str, object]:
    made: dict[str, object] = {"id": f"cell-{number}", "metadata": {}, "source": cell.text.splitlines(keepends=True)}
    if cell.kind == "text":
        return {"cell_type": "markdown", **made}
    return {"cell_type": "code", "execution_count": None, "outputs": [], **made}
