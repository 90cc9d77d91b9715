"""A cell's result for programs: `CellResult.to_dict`, `CellError.to_dict`, and a part of the cell's display.

`axon_nb/records/cell_result.schema.json` describes it. It takes at most 4 KiB, whatever the ranks did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb._version import RECORD_VERSION
from axon_nb.cluster.failures.next_steps import failure_place, next_commands
from axon_nb.cluster.failures.report import Failure, RankError
from axon_nb.errors import CellError, CellInterrupt, CellTimeoutError
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cells.run import CellRun

MIME_TYPE = "application/vnd.axon-nb.result+json"
MAX_RECORD_BYTES = 4096
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TEXT_LIMITS = (600, 240, 100, 40)
"""Characters of one text; the next lower limit applies while the record is too large."""
_MAX_GROUPS = 12


def cell_record(run: CellRun, failure: BaseException | None = None) -> dict[str, Any]:
    """Return what programs read about a cell that is done, as plain JSON values.

    Args:
        run: The cell.
        failure: The exception that it raises in the notebook; None: it did not fail, or nothing is raised.
    """
    for limit in _TEXT_LIMITS:
        record = _record(run, failure, limit)
        if len(json.dumps(record)) <= MAX_RECORD_BYTES:
            break
    return record


def _record(run: CellRun, failure: BaseException | None, limit: int) -> dict[str, Any]:
    details = getattr(failure, "failure", None)
    known = details if isinstance(details, Failure) else None
    commands = next_commands(known, run.ranks) if known is not None else ()
    return {
        "version": RECORD_VERSION,
        "state": _state(failure, run.errors),
        "cell": run.number,
        "ranks": _short(format_ranks(run.ranks), limit),
        "seconds": round(max(run.cell.seconds.values(), default=0.0), 6),
        "cause": None if known is None else _cause(known, run.number, limit),
        "groups": _groups(run.ranks, run.errors, limit),
        "verdict": _short(run.explanation, 2 * limit),
        "hint": _short("" if known is None else known.hint, limit),
        "next": [{"command": command, "does": text} for command, text in commands],
    }


def _state(failure: BaseException | None, errors: Mapping[int, RankError]) -> str:
    if isinstance(failure, CellInterrupt):
        return "interrupted"
    if isinstance(failure, CellTimeoutError):
        return "timed_out"
    return "failed" if errors or isinstance(failure, CellError) else "ok"


def _cause(failure: Failure, cell: int | None, limit: int) -> dict[str, Any]:
    cause, place = failure.cause, failure_place(failure.cause, cell)
    return {
        "ranks": _short(format_ranks(failure.alike), limit),
        "kind": cause.kind,
        "type": _short(cause.ename, limit),
        "message": _short(cause.evalue, limit),
        "file": None if place is None else _short(place.file, limit),
        "line": None if place is None else place.line,
    }


def _groups(ranks: Sequence[int], errors: Mapping[int, RankError], limit: int) -> list[dict[str, str]]:
    """Return what the ranks did; those that did the same share an entry."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        error = errors.get(rank)
        key = ("finished", "") if error is None else (error.kind, _short(_words(error), limit))
        alike.setdefault(key, []).append(rank)
    entries = [
        {"ranks": _short(format_ranks(sharing), limit), "did": kind, "text": text}
        for (kind, text), sharing in list(alike.items())[:_MAX_GROUPS]
    ]
    rest = [rank for sharing in list(alike.values())[_MAX_GROUPS:] for rank in sharing]
    if rest:
        entries.append({"ranks": _short(format_ranks(rest), limit), "did": "other", "text": ""})
    return entries


def _words(error: RankError) -> str:
    return str(error) if error.kind == "raised" else error.evalue


def _short(text: str, limit: int) -> str:
    text = _ANSI.sub("", text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
