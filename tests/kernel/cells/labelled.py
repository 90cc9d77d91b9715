"""Reading what ranks print: lines with the ranks in front, such as ``[ranks 0-3] hello``.

A notebook shows a line of several ranks once if it comes from them within a fraction of a second. On a busy machine one
may come later, and is then shown again with its own label. Tests read both in the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from axon_nb.records.ranks import format_ranks

_LABELLED = re.compile(r"(\[ranks? ([\d,-]+)\])(?: (.*))?")


@dataclass
class _Block:
    """One line, or one text of several lines."""

    ranks: set[int]
    """Empty: the notebook's own."""
    lines: list[str | None]
    """Without label and indentation; the first is None when there is only the label."""


def ranks_of(line: str) -> set[int]:
    """The ranks in front of a line such as ``[ranks 0,2-3] text``; none for other lines."""
    found = _LABELLED.match(line)
    if found is None:
        return set()
    spans = [span.partition("-") for span in found[2].split(",")]
    return {rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)}


def merged(text: str) -> list[str]:
    """The lines of a text, those of several ranks as one, whenever they came; each rank's keep their order."""
    blocks: list[_Block] = []
    for block in _read(text):
        if not block.ranks:
            blocks.append(block)
        for rank in sorted(block.ranks):
            _place(blocks, rank, block.lines)
    return [line for block in blocks for line in _show(block)]


def _read(text: str) -> list[_Block]:
    blocks: list[_Block] = []
    indent = ""
    for line in text.splitlines():
        found = _LABELLED.fullmatch(line)
        if found is not None:
            indent = " " * (len(found[1]) + 1)
            blocks.append(_Block(ranks_of(line), [found[3]]))
        elif indent and line.startswith(indent):
            blocks[-1].lines.append(line[len(indent) :])
        else:
            indent = ""
            blocks.append(_Block(set(), [line]))
    return blocks


def _place(blocks: list[_Block], rank: int, lines: list[str | None]) -> None:
    """Add a rank to the earliest block of the same lines that does not come before one of its own."""
    place = None
    for block in reversed(blocks):
        if not block.ranks or rank in block.ranks:
            break
        if block.lines == lines:
            place = block
    if place is None:
        blocks.append(_Block({rank}, lines))
    else:
        place.ranks.add(rank)


def _show(block: _Block) -> list[str]:
    first, *rest = block.lines
    if not block.ranks:
        return [first or ""]
    label = f"[rank{'s' * (len(block.ranks) > 1)} {format_ranks(block.ranks)}]"
    return [label if first is None else f"{label} {first}", *(f"{' ' * (len(label) + 1)}{line}" for line in rest)]
