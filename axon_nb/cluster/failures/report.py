"""Which rank's failure is the cause, and how the cell's failure reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axon_nb.errors import CellError, CellInterrupt, CellTimeoutError
from axon_nb.records.ranks import format_ranks

__all__ = ["REPAIR", "RankError", "cell_error", "interrupt_error", "root_cause"]

REPAIR = "`%distributed repair` replaces such ranks by fresh ones; the others keep all they have."

# A rank that died took the others with it; an error of its own comes before what it caused elsewhere.
_ORDER = {"died": 0, "raised": 1, "stuck": 2, "ended": 3}


@dataclass(frozen=True, slots=True)
class RankError:
    """How a cell failed on one rank."""

    rank: int
    kind: str
    """``raised``, ``ended`` (from outside), ``died`` or ``stuck``."""
    ename: str
    """Name of the exception's type; empty when none was raised."""
    evalue: str
    """The exception's message, or what happened."""
    traceback: tuple[str, ...] = ()
    """The rank's own traceback, with terminal colours."""

    def __str__(self) -> str:
        return f"{self.ename}: {self.evalue}" if self.ename else self.evalue


def root_cause(errors: Mapping[int, RankError], first: Sequence[int] = ()) -> RankError:
    """The failure to show first.

    Args:
        errors: Failures by rank, not empty.
        first: Ranks in the order in which they failed.
    """
    arrival = {rank: position for position, rank in enumerate(first)}
    return min(errors.values(), key=lambda e: (_ORDER[e.kind], arrival.get(e.rank, len(arrival)), e.rank))


def cell_error(
    errors: Mapping[int, RankError],
    *,
    first: Sequence[int],
    explanation: str = "",
    hint: str = "",
    timeout_s: float | None = None,
) -> CellError:
    """The exception of a failed cell: the root cause's traceback, then each other failure in one line.

    Args:
        errors: Failures by rank.
        first: Ranks in the order in which they failed.
        explanation: Why the cell could not end by itself, when it was that which ended it.
        hint: What the user can do now; one sentence, may be empty.
        timeout_s: The cell's time limit in seconds when it was the limit that ended it.
    """
    if explanation:
        told = {error.rank for error in errors.values() if error.kind == "ended"}
        return CellError(explanation, [f"CellError: {explanation}", *_others(errors, told)])
    cause = root_cause(errors, first)
    alike = [e.rank for e in errors.values() if (e.kind, e.ename, e.evalue) == (cause.kind, cause.ename, cause.evalue)]
    who = f"rank {cause.rank}" if len(alike) == 1 else f"ranks {format_ranks(alike)}"
    message = f"{who}: {cause}" if cause.kind == "raised" else f"{who} {cause.evalue}"
    if timeout_s is not None:
        message = f"not ended within --timeout {timeout_s:g} s; {message}"
    report = [f"[{who}]", *cause.traceback] if cause.traceback else [f"CellError: {message}"]
    report += _others(errors, set(alike))
    if timeout_s is not None:
        report.append(f"The cell had not ended within its --timeout of {timeout_s:g} s.")
    if hint:
        report.append(hint)
    kind = CellError if timeout_s is None else CellTimeoutError
    return kind(message, report)


def interrupt_error(
    errors: Mapping[int, RankError], ranks: Sequence[int], replaced: Sequence[str] = ()
) -> CellInterrupt:
    """The exception of a cell that the user interrupted: who has stopped, and where each rank was.

    Args:
        errors: Failures by rank; may be empty.
        ranks: The ranks of the cell.
        replaced: What was done with those that have not stopped; empty: nothing.
    """
    stopped = [rank for rank in ranks if rank not in errors or errors[rank].kind != "stuck"]
    message = f"ranks {format_ranks(stopped)} have stopped." if stopped else "no rank has stopped."
    report = _others(errors, set())
    if replaced:
        report += replaced
    elif len(stopped) < len(ranks):
        stuck = format_ranks([rank for rank in ranks if rank not in stopped])
        report.append(
            f"`%distributed repair --ranks {stuck}` replaces what has not stopped by fresh ranks, as a second "
            "interrupt while a cell ends does; the others keep all they have."
        )
    return CellInterrupt(message, report)


def _others(errors: Mapping[int, RankError], shown: set[int]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for error in errors.values():
        if error.rank not in shown:
            text = str(error) if error.kind == "raised" else error.evalue
            groups.setdefault(text.splitlines()[0][:200] if text else error.kind, []).append(error.rank)
    return [
        f"[{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}] {text}" for text, ranks in groups.items()
    ]
