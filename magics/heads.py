"""The first line of a cell: whether it sends the cell to ranks, and to which."""

from __future__ import annotations

import re
from dataclasses import dataclass

from axon_nb.errors import UsageError
from axon_nb.records.ranks import parse_ranks

__all__ = ["RANK_MAGICS", "AutoMode", "CellHead", "auto_mode", "read_head", "target_rank"]

RANK_MAGICS = ("distributed", "rank")
"""The cell magics that send a cell to ranks."""
_RANKS = re.compile(r"--ranks[\s=]+(\S+)")


@dataclass
class AutoMode:
    """Whether plain cells run on ranks, as `%distributed auto` has set it."""

    on: bool = False
    ranks: str | None = None
    """Which ranks, as for `--ranks`; None: all."""


auto_mode = AutoMode()
"""The mode of this notebook."""


@dataclass(frozen=True, slots=True)
class CellHead:
    """The magic of a cell."""

    name: str
    """Without the percent signs; empty in a plain cell."""
    arguments: str
    """What stands behind it."""


def read_head(text: str) -> CellHead:
    """The head of a cell, also of one that is half written."""
    first = text.lstrip().partition("\n")[0].rstrip()
    if not first.startswith("%%"):
        return CellHead("", "")
    name, _, arguments = first[2:].partition(" ")
    return CellHead(name, arguments.strip())


def target_rank(text: str, world_size: int) -> int | None:
    """The first rank that a cell runs on; None when it runs in the notebook."""
    head = read_head(text)
    if head.name == "" and auto_mode.on:
        spec = auto_mode.ranks or ""
    elif head.name not in RANK_MAGICS:
        return None
    elif head.name == "rank":
        spec = head.arguments.partition(" ")[0]
    else:
        match = _RANKS.search(head.arguments)
        spec = match.group(1) if match else ""
    try:
        return parse_ranks(spec, world_size)[0] if spec else 0
    except UsageError:
        return 0
