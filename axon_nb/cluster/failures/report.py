"""Finds the root cause among the ranks' failures, and words the cell's error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axon_nb.errors import CellError, CellInterrupt, CellTimeoutError
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.troubleshooting import MORE, more

REPAIR_HINT = "Run `%distributed repair` to replace the failed ranks; all others keep their state."

# A death brings down the other ranks, and an exception comes before the aborts that it causes elsewhere.
_ORDER = {"died": 0, "raised": 1, "stuck": 2, "aborted": 3}


@dataclass(frozen=True, slots=True)
class RankError:
    """How a cell failed on one rank."""

    rank: int
    kind: str
    """``raised``, ``aborted`` (by the notebook), ``died`` or ``stuck``."""
    ename: str
    """Name of the exception's type; empty if none was raised."""
    evalue: str
    """The exception's message, or what happened."""
    traceback: tuple[str, ...] = ()
    """The rank's own traceback, with terminal colours."""
    remedy: str = ""
    """What to do about it, as a sentence; empty: what its kind needs."""

    def __str__(self) -> str:
        return f"{self.ename}: {self.evalue}" if self.ename else self.evalue


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of ranks that died."""

    remedy: str = REPAIR_HINT
    """How to get dead and stuck ranks back, as a sentence."""
    text: str = ""
    """As a sentence; empty: only their variables are lost."""
    step: int | None = None
    """The last optimizer step to which a repair may bring all ranks back; None: it can bring them to none."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a cell failed, by rank."""

    cause: RankError
    """The failure to show first."""
    alike: tuple[int, ...]
    """Ranks that failed as the cause did."""
    errors: Mapping[int, RankError]
    """All failures by rank; ranks without one have finished the cell."""
    explanation: str = ""
    """Why the ranks could not finish, such as a deadlock; empty if the cause is an error of one rank."""
    hint: str = ""
    """What the user can do now; may be empty."""
    kept: Kept = Kept()
    """What is kept of ranks that died."""


def root_cause(errors: Mapping[int, RankError], first: Sequence[int] = ()) -> RankError:
    """Return the failure to show first.

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
    kept: Kept | None = None,
) -> CellError:
    """Create the exception of a failed cell: the root cause's traceback, then one line for each other failure.

    Args:
        errors: Failures by rank.
        first: Ranks in the order in which they failed.
        explanation: Why the ranks could not finish, such as a deadlock, if the cell was aborted for that.
        hint: What the user can do now; one sentence, may be empty.
        timeout_s: The cell's timeout in seconds if the cell exceeded it.
        kept: What is kept of ranks that died.
    """
    kept = kept or Kept()
    if explanation:
        aborted = {error.rank for error in errors.values() if error.kind == "aborted"}
        exception = CellError(explanation, [f"CellError: {explanation}", *_others(errors, aborted), *more(explanation)])
        if errors:
            cause = root_cause(errors, first)
            exception.failure = Failure(cause, (cause.rank,), dict(errors), explanation, hint, kept)
        return exception
    cause = root_cause(errors, first)
    alike = [e.rank for e in errors.values() if (e.kind, e.ename, e.evalue) == (cause.kind, cause.ename, cause.evalue)]
    who = name_ranks(alike)
    message = f"{who}: {cause}" if cause.kind == "raised" else f"{who} {agree(cause.evalue, len(alike))}"
    if timeout_s is not None:
        message = f"timed out after {timeout_s:g} s (--timeout); {message}"
    report = [f"[{who}]", *cause.traceback] if cause.traceback else [f"CellError: {message}"]
    report += _others(errors, set(alike))
    if timeout_s is not None:
        report.append(f"The cell timed out after {timeout_s:g} s (--timeout).")
    report += filter(None, (kept.text if cause.kind == "died" else "", hint))
    if not any(line.startswith(MORE) for text in cause.traceback for line in text.splitlines()):
        report += more("\n".join([hint, "" if cause.kind == "raised" else message]))
    kind = CellError if timeout_s is None else CellTimeoutError
    failed = kind(message, report)
    failed.failure = Failure(cause, tuple(alike), dict(errors), hint=hint, kept=kept)
    return failed


def interrupt_error(
    errors: Mapping[int, RankError], ranks: Sequence[int], replaced: Sequence[str] = ()
) -> CellInterrupt:
    """Create the exception of a cell that the user interrupted: which ranks stopped, and where each one was.

    Args:
        errors: Failures by rank; may be empty.
        ranks: The ranks of the cell.
        replaced: Sentences about the ranks that were replaced because they did not stop; may be empty.
    """
    stopped = [rank for rank in ranks if rank not in errors or errors[rank].kind != "stuck"]
    message = f"{name_ranks(stopped).capitalize()} stopped." if stopped else "No rank stopped."
    report = _others(errors, set())
    if replaced:
        report += replaced
    elif remedies := {error.remedy for error in errors.values() if error.remedy}:
        report += sorted(remedies)
    elif stuck := [rank for rank in ranks if rank not in stopped]:
        report.append(
            f"{name_ranks(stuck).capitalize()} did not stop. Run `%distributed repair --ranks {format_ranks(stuck)}` "
            f"to replace {'it' if len(stuck) == 1 else 'them'}; all other ranks keep their state. "
            "(A second interrupt while a cell is being aborted does the same.)"
        )
    return CellInterrupt(message, report)


def agree(text: str, count: int) -> str:
    """Put a description of one rank, such as ``was interrupted``, into the plural if there are several."""
    for one, many in (("was ", "were "), ("is ", "are ")):
        if count > 1 and text.startswith(one):
            return many + text.removeprefix(one).replace(" does not ", " do not ")
    return text


def _others(errors: Mapping[int, RankError], shown: set[int]) -> list[str]:
    groups: dict[tuple[bool, str], list[int]] = {}
    for error in errors.values():
        if error.rank not in shown:
            raised = error.kind == "raised"
            text = str(error) if raised else error.evalue
            groups.setdefault((raised, text.splitlines()[0][:200] if text else error.kind), []).append(error.rank)
    return [
        f"[{name_ranks(ranks)}] {text if raised else agree(text, len(ranks))}"
        for (raised, text), ranks in groups.items()
    ]
