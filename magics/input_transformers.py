"""Input transformers: read a cell's first line for whether and where it runs on ranks, and `%distributed auto on`.

A `%%distributed` cell and `%distributed run` become an awaited call, so that widgets stay responsive while it runs.
With `auto`, plain cells run on ranks; `%%local` cells and axon_nb's line magics run in the notebook.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.magic import Magics, cell_magic, magics_class
from msgspec import Struct

from axon_nb.cluster.cells import source as cell_code
from axon_nb.cluster.cells.source import RANK_MAGICS
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.history import RankCell
from axon_nb.cluster.session import current
from axon_nb.cluster.session.current import AutoMode
from axon_nb.errors import UsageError
from axon_nb.records.history import ExecutedCell
from axon_nb.records.ranks import parse_ranks
from axon_nb.shell import user_frame

_RANKS = re.compile(r"--ranks[\s=]+(\S+)")
_OURS = "distributed|gather|inside|memory|pull|push|scatter|shards|timeline|watch"
_HELP_LINE = re.compile(rf"^(%(?:{_OURS})\s+[^\s?].*?)\s*\?{{1,2}}\s*$")
_RUN_LINE = re.compile(r"%distributed\s+run\s+(?P<words>[^\s?].*?)\s*")
_PARAMETERS = re.compile(r"# Parameters\s*$")
"""The first line of the cell that papermill adds below the one that is tagged `parameters`."""
_ASSIGNED = re.compile(r"^(?P<names>[^\W\d]\w*(?:\s*,\s*[^\W\d]\w*)*)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)
AWAITED = "await get_ipython().magics_manager.registry['CellMagics'].run("
"""How the line begins that a cell for ranks becomes."""
_NOTEBOOK_MAGICS = ("load_ext", "reload_ext", "unload_ext")
"""IPython's line magics that would be useless on ranks."""


class CellHead(Struct, frozen=True):
    """The magic of a cell."""

    name: str
    """Name of the magic without percent signs; empty for a plain cell."""
    arguments: str
    """The text after the name."""


def read_head(text: str) -> CellHead:
    """Read the head of a cell, which may be incomplete."""
    first = text.lstrip().partition("\n")[0].rstrip()
    if not first.startswith("%%"):
        return CellHead("", "")
    name, _, arguments = first[2:].partition(" ")
    return CellHead(name, arguments.strip())


def target_rank(text: str, cluster: Cluster | None, auto: AutoMode) -> int | None:
    """Return the first rank that a cell runs on; None if it runs in the notebook.

    Args:
        text: The cell.
        cluster: The current cluster; None: there is none.
        auto: Where plain cells run.
    """
    if cluster is None:
        return None
    head = read_head(text)
    if head.name == "" and auto.on:
        spec = auto.ranks or ""
    elif head.name not in RANK_MAGICS:
        return None
    else:
        spec = _ranks_of(head)
    try:
        return parse_ranks(spec, cluster.world_size)[0] if spec else 0
    except UsageError:
        return 0


def _ranks_of(head: CellHead) -> str:
    """Return which ranks a cell names; empty: all."""
    if head.name == "rank":
        return head.arguments.partition(" ")[0]
    match = _RANKS.search(head.arguments)
    return match.group(1) if match else ""


def injected_parameters(lines: list[str]) -> list[str]:
    """An input transformer: parameters that papermill puts below a cell for ranks are sent to these ranks, too."""
    if not (lines and _PARAMETERS.match(lines[0])) or current.session().auto.on:
        return lines
    _, entries = current.session().history.entries()
    if not (entries and isinstance(above := entries[-1], ExecutedCell)):
        return lines
    head, names = read_head(f"%%{above.magic}"), _assigned("".join(lines))
    if head.name not in RANK_MAGICS or not names & _assigned(above.code):
        return lines
    ranks = _ranks_of(head)
    where = f"rank{'' if ranks.isdigit() else 's'} {ranks}" if ranks else "the ranks"
    said = f"Sent {', '.join(sorted(names))} to {where}, because the cell above sets parameters there."
    push = f"%push {' '.join(sorted(names))}{f' --ranks {ranks}' if ranks else ''}"
    return [*lines[:-1], f"{lines[-1].rstrip()}\n", f"{push}\n", f"print({said!r})\n"]


def _assigned(code: str) -> set[str]:
    """Return the names that lines of a cell assign."""
    return {name for match in _ASSIGNED.finditer(code) for name in re.findall(r"\w+", match["names"])}


def awaited_cells(lines: list[str]) -> list[str]:
    """An input transformer: a cell that starts with one of our magics becomes one awaited call; others stay.

    A cell within a cell stays, too: `%%time` and `%%capture` run what is below them without an event loop.
    """
    if user_frame(inspect.currentframe()) is not None:
        return lines
    history = current.session().history
    history.expect(None)
    shell = get_ipython()
    if shell is not None and shell.autoawait and (script := _RUN_LINE.fullmatch("".join(lines).strip())):
        history.expect(RankCell("distributed", f"%run {script['words']}\n"))
        return [f"{AWAITED}'run', get_ipython().var_expand({script['words']!r}), '')\n"]
    if not lines or not lines[0].startswith("%%"):
        return lines
    name, _, arguments = lines[0][2:].strip().partition(" ")
    if name not in RANK_MAGICS or shell is None or arguments.strip() in ("?", "??"):
        return lines
    body = "".join(lines[1:])
    history.expect(RankCell(f"{name} {arguments.strip()}".strip(), body))
    if not shell.autoawait:
        return lines
    return [f"{AWAITED}{name!r}, {arguments.strip()!r}, {body!r})\n"]


# `check_complete` skips transformers with side effects, so that in a terminal a cell continues until an empty line.
vars(awaited_cells)["has_side_effects"] = True


def help_requests(lines: list[str]) -> list[str]:
    """An input transformer: `%distributed start?` shows the command's help; IPython would look for a name `start`."""
    if not lines or lines[0].startswith("%%"):
        return lines
    return [f"{match.group(1)} --help\n" if (match := _HELP_LINE.match(line)) else line for line in lines]


class Piece(Struct, frozen=True):
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
