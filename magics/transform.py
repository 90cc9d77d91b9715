"""`%%distributed` on a cell's first line becomes an awaited call: widgets stay clickable while the cell runs."""

from __future__ import annotations

import re

from IPython.core.getipython import get_ipython

from axon_nb.magics.heads import RANK_MAGICS

__all__ = ["asked_help", "awaited_cells"]

_OURS = "distributed|gather|memory|pull|push|scatter|shards|timeline|watch"
_HELP_LINE = re.compile(rf"^(%(?:{_OURS})\s+[^\s?].*?)\s*\?{{1,2}}\s*$")


def awaited_cells(lines: list[str]) -> list[str]:
    """An input transformer: a cell that begins with one of our magics becomes one awaited call; others stay."""
    if not lines or not lines[0].startswith("%%"):
        return lines
    name, _, arguments = lines[0][2:].strip().partition(" ")
    shell = get_ipython()
    if name not in RANK_MAGICS or shell is None or not shell.autoawait or arguments.strip() in ("?", "??"):
        return lines
    body = "".join(lines[1:])
    call = f"get_ipython().magics_manager.registry['CellMagics'].run({name!r}, {arguments.strip()!r}, {body!r})"
    return [f"await {call}\n"]


# `check_complete` leaves such transformers out: in a terminal a cell goes on until an empty line.
vars(awaited_cells)["has_side_effects"] = True


def asked_help(lines: list[str]) -> list[str]:
    """An input transformer: `%distributed start?` asks us for help, where IPython would look for a `start`."""
    if not lines or lines[0].startswith("%%"):
        return lines
    return [f"{match.group(1)} --help\n" if (match := _HELP_LINE.match(line)) else line for line in lines]
