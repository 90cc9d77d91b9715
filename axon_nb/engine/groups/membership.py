"""Communication with ranks that do not run the cell: refused before it begins, when it can be known to be in vain.

It can be known when the notebook says that the cell is alone: it was sent in blocking form, so that none is sent
beside it, no other cell runs, and no rank outside has an open call or a thread of the user's that might communicate.
Everything else (cells in the background that meet, threads that serve) is left to the deadlock watch, which sees both
sides. A call that is begun without waiting for it is legitimate, too: a later cell may bring the other side; it is
refused when this cell waits for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch.distributed as dist

from axon_nb.engine.groups.activity import pending
from axon_nb.engine.groups.naming import call_in_words, public_call
from axon_nb.errors import UsageError
from axon_nb.records.ranks import format_ranks

__all__ = ["enter", "is_alone", "leave", "refusal"]

_alone: list[frozenset[int]] = []


def enter(ranks: Sequence[int] | None) -> None:
    """A cell begins; `ranks`: those that run it, when no others can take part; None: others can, or all run it."""
    _alone[:] = [] if ranks is None else [frozenset(ranks)]


def leave() -> None:
    """The cell is over; what it has begun may be waited for in the next."""
    if _alone:
        _alone.clear()
        for call in pending():
            call.refusal = ""


def is_alone() -> bool:
    """Whether communication with ranks outside the cell is in vain."""
    return bool(_alone)


def refusal(group: dist.ProcessGroup, name: str, peer: int) -> str:
    """Why an operation cannot end; empty when it can, or when that is not known.

    Args:
        group: The group.
        name: The operation, such as ``allreduce``.
        peer: Group rank of the other side of a send or recv; -1: any, or none.

    Raises:
        UsageError: it cannot end, and the caller would wait for it at once.
    """
    if not _alone or threading.current_thread() is not threading.main_thread():
        return ""
    cell = _alone[0]
    members = dist.get_process_group_ranks(group)
    if name in ("recv", "send"):
        needed = {members[peer]}
    elif name == "recv_anysource":
        needed = set() if len(cell.intersection(members)) > 1 else set(members) - cell
    else:
        needed = set(members)
    if not (outside := needed - cell):
        return ""
    text = _sentence(call_in_words(name), members, cell, outside, one_to_one=name in ("recv", "send"))
    if public_call(sys._getframe(1))[1]:
        raise UsageError(text)
    return text


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


def _sentence(what: str, members: Sequence[int], cell: frozenset[int], outside: set[int], *, one_to_one: bool) -> str:
    where = f"with {_named(sorted(outside))}" if one_to_one else f"on the group of {_named(sorted(members))}"
    verb = "does" if len(outside) == 1 else "do"
    fix = "Run the cell on all ranks"
    if one_to_one:
        fix = f"Run the cell on {_named(sorted(cell | outside))}"
    elif len(cell) > 1:
        fix = "Use `group=subgroup`, the group of this cell's ranks, or run the cell on all ranks"
    absent = f"{_named(sorted(outside))} {verb} not run this cell"
    return f"{what}, {where}, in a cell of {_named(sorted(cell))}: {absent}. {fix}."
