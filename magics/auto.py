"""`%distributed auto on`: plain cells run on ranks; `%%local` cells and axon_nb's line magics run in the notebook."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.magic import Magics, cell_magic, magics_class

from axon_nb.cluster.cells import source as cell_code
from axon_nb.cluster.history import RankCell
from axon_nb.cluster.session import current
from axon_nb.errors import UsageError
from axon_nb.magics.cell_head import AWAITED

_NOTEBOOK_MAGICS = ("load_ext", "reload_ext", "unload_ext")
"""IPython's line magics that would be useless on ranks."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive lines of a cell that run in one place."""

    magic: str
    """Name of the line magic that runs in the notebook; empty: code for ranks."""
    text: str
    """The magic's arguments; or the code, below a comment for each line above it, so that its line numbers stay."""


def split_cell(body: str, is_local: Callable[[str], bool]) -> list[Piece]:
    """Split a plain cell into pieces, in the order in which they run.

    Args:
        body: The cell.
        is_local: Returns whether the line magic with this name runs in the notebook.
    """
    pieces: list[Piece] = []
    chunk: list[str] = []
    lines = body.splitlines(keepends=True)

    def close_chunk(end: int) -> None:
        code = "".join(chunk)
        if not cell_code.is_empty(code):
            pieces.append(Piece("", "#\n" * (end - len(chunk)) + code))
        chunk.clear()

    for number, line in enumerate(lines):
        name, _, rest = line[1:].strip().partition(" ")
        bare = name.rstrip("?")
        if line.startswith("%") and is_local(bare) and _is_complete("".join(chunk)):
            close_chunk(number)
            pieces.append(Piece(name, rest.strip()) if name == bare else Piece("pinfo", f"%{bare}"))
        else:
            chunk.append(line)
    close_chunk(len(lines))
    return pieces


def _is_complete(code: str) -> bool:
    """Return whether `code` parses by itself, so that the next line is not inside a string or brackets."""
    try:
        python = TransformerManager().transform_cell(code)
        compile(python, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError):
        return False
    return True


def auto_cells(lines: list[str]) -> list[str]:
    """An input transformer: in auto mode a plain cell becomes one call; a `%%local` cell becomes a plain one."""
    if not lines:
        return lines
    if lines[0].split() == ["%%local"]:
        rest = lines[1:]
        return rest if rest and rest[0].startswith("%%") else [f"# {lines[0]}", *rest]
    shell = get_ipython()
    if not current.session().auto.on or lines[0].startswith(("%%", AWAITED)):
        return lines
    if shell is None or not _from_front_end(shell, lines):
        return lines
    body = "".join(lines)
    if cell_code.is_empty(body):
        return lines
    current.session().history.expect(RankCell(f"distributed {_line()}".strip(), body))
    registry = "get_ipython().magics_manager.registry['AutoMagics']"
    return [f"await {registry}.run({body!r})\n" if shell.autoawait else f"{registry}.run_blocking({body!r})\n"]


# `check_complete` skips transformers with side effects. Otherwise an unfinished block would look complete in a
# terminal.
vars(auto_cells)["has_side_effects"] = True


def _from_front_end(shell: Any, lines: list[str]) -> bool:
    """Return whether these lines are the cell that the user sent, not a script that it runs or a request."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return True
    content = kernel.get_parent("shell").get("content", {})
    if content.get("silent", True) or not content.get("store_history", True):  # an editor's, such as its variable list
        return False
    sent = f"{content.get('code', '')}\n".splitlines(keepends=True)
    for transform in shell.input_transformer_manager.cleanup_transforms:
        if transform is auto_cells:
            break
        sent = transform(sent)
    return [line.rstrip("\n") for line in lines] == [line.rstrip("\n") for line in sent][: len(lines)]


@magics_class
class AutoMagics(Magics):
    """Runs plain cells on ranks; `%%local`."""

    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run the cell in the notebook, as without `%distributed auto on`.

        Example: a cell of the two lines `%%local` and `import matplotlib.pyplot as plt`.
        """
        if line.strip():
            raise UsageError(f"%%local takes no options; got {line.strip()!r}.")
        self.shell.run_cell(cell, store_history=False).raise_error()

    async def run(self, body: str) -> None:
        """Run a plain cell piece by piece."""
        for piece in self._pieces(body):
            if piece.magic:
                self._run_magic(piece)
            else:
                await self._cells().run("distributed", _line(), piece.text, plain=True)

    def run_blocking(self, body: str) -> None:
        """Run a plain cell piece by piece, if IPython does not await."""
        for piece in self._pieces(body):
            if piece.magic:
                self._run_magic(piece)
            else:
                self._cells().run_blocking("distributed", _line(), piece.text, plain=True)

    def _cells(self) -> Any:
        return self.shell.magics_manager.registry["CellMagics"]

    def _pieces(self, body: str) -> list[Piece]:
        magics = self.shell.magics_manager.magics["line"]

        def is_local(name: str) -> bool:
            is_ours = getattr(magics.get(name), "__module__", "").startswith("axon_nb.")
            return is_ours or name in _NOTEBOOK_MAGICS

        return split_cell(body, is_local)

    def _run_magic(self, piece: Piece) -> None:
        value = self.shell.run_line_magic(piece.magic, piece.text)
        if value is not None:
            self.shell.displayhook(value)


def _line() -> str:
    ranks = current.session().auto.ranks
    return f"--ranks {ranks}" if ranks else ""
