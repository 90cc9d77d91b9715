"""Where a cell failed, and what to run next: what the card of a failed cell and its record have in common."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from axon_nb.cluster.failures.report import Failure, RankError
from axon_nb.records.ranks import format_ranks
from axon_nb.records.stacks import library_of

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"Cell In\[(?P<cell>\d+)\], line (?P<line>\d+)(?:, in (?P<function>[\w.<>]+))?")
_ANY_FRAME = re.compile(r"^(?:(?P<cell>Cell In\[\d+\]), line |File (?P<file>[^\n]+?):)(?P<line>\d+)", re.MULTILINE)
_WAITED_AT = re.compile(r" at line (\d+)")


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    """A path, or a cell such as ``Cell In[5]``."""
    line: int


def failure_line(error: RankError, cell: int) -> tuple[int, int] | None:
    """Return where a rank failed in a cell: the cell's innermost line and its outermost one; None: not in that cell.

    Args:
        error: The error with its traceback.
        cell: Number of the cell.
    """
    text = _ANSI.sub("", "\n".join(error.traceback))
    lines = [int(frame["line"]) for frame in _FRAME.finditer(text) if int(frame["cell"]) == cell]
    return (lines[-1], lines[0]) if lines else None


def failure_place(error: RankError, cell: int | None) -> Place | None:
    """Return the innermost line of the user's code at which a rank failed or waited; None: unknown.

    Args:
        error: The error.
        cell: Number of the cell; None: unknown.
    """
    text = _ANSI.sub("", "\n".join(error.traceback))
    for frame in reversed(list(_ANY_FRAME.finditer(text))):
        file = frame["cell"] or os.path.expanduser(frame["file"])
        if frame["cell"] or not library_of(file):
            return Place(file, int(frame["line"]))
    waited = _WAITED_AT.search(error.evalue) if error.kind in ("aborted", "stuck") else None
    return Place(f"Cell In[{cell}]", int(waited[1])) if waited and cell is not None else None


def next_commands(failure: Failure, ranks: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the commands to run after a failure, each with what it does.

    Args:
        failure: What happened.
        ranks: The ranks that ran the cell.
    """
    kinds = {error.kind for error in failure.errors.values()}
    stuck = sorted(rank for rank, error in failure.errors.items() if error.kind == "stuck")
    if failure.cause.kind == "raised":
        rank = failure.alike[0]
        yield f"%distributed debug --ranks {rank}", f"opens the debugger where rank {rank} failed"
        yield "%distributed vars", "shows the variables of all ranks, and which differ"
    if "died" in kinds and failure.kept.step is not None:
        yield "%distributed repair", "replaces dead ranks, and brings all ranks back to the last step that is kept"
    elif "died" in kinds:
        yield "%distributed repair", "replaces dead ranks; the new ones are empty"
        alive = next(
            (rank for rank in ranks if rank not in failure.errors or failure.errors[rank].kind != "died"), None
        )
        if alive is not None:
            yield f"%distributed repair --from {alive}", f"replaces them with the variables of rank {alive}"
    if stuck:
        yield "%distributed stacks", "shows where they are stuck"
        yield f"%distributed repair --ranks {format_ranks(stuck)}", "replaces them"
