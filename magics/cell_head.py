"""Reads the first line of a cell: whether it sends the cell to ranks, and to which.

A `%%distributed` cell and `%distributed run` become an awaited call, so that widgets stay responsive while it runs.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from IPython.core.getipython import get_ipython

from axon_nb.cluster.cells.source import RANK_MAGICS
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.history import RankCell
from axon_nb.cluster.session import current
from axon_nb.cluster.session.notebook import AutoMode
from axon_nb.errors import UsageError
from axon_nb.records.history import ExecutedCell
from axon_nb.records.ranks import parse_ranks
from axon_nb.shell.user_frame import user_frame

_RANKS = re.compile(r"--ranks[\s=]+(\S+)")
_OURS = "distributed|gather|memory|pull|push|scatter|shards|timeline|watch"
_HELP_LINE = re.compile(rf"^(%(?:{_OURS})\s+[^\s?].*?)\s*\?{{1,2}}\s*$")
_RUN_LINE = re.compile(r"%distributed\s+run\s+(?P<words>[^\s?].*?)\s*")
_PARAMETERS = re.compile(r"# Parameters\s*$")
"""The first line of the cell that papermill adds below the one that is tagged `parameters`."""
_ASSIGNED = re.compile(r"^(?P<names>[^\W\d]\w*(?:\s*,\s*[^\W\d]\w*)*)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)
AWAITED = "await get_ipython().magics_manager.registry['CellMagics'].run("
"""How the line begins that a cell for ranks becomes."""


@dataclass(frozen=True, slots=True)
class CellHead:
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
