"""Reads a notebook file as a history: its executed cells in the order of their prompts."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from axon_nb.cluster.history import failed_line
from axon_nb.errors import UsageError
from axon_nb.export.steps import pushes_in
from axon_nb.records.history import ExecutedCell, PushedValues, SessionFacts

_ON_RANKS = ("distributed", "rank")
_INTERRUPTED = ("CellInterrupt", "KeyboardInterrupt")
_RESET_COMMANDS = ("start", "restart")
"""Commands that discard everything done on ranks before."""
_AUTO_STARTED = re.compile(r"^Started (\d+) ranks? \((\w+)\)[;.]", re.MULTILINE)
"""Printed by a cell that started ranks automatically."""


def read_notebook(path: Path) -> tuple[SessionFacts, list[ExecutedCell | PushedValues]]:
    """Read facts and cells from an `.ipynb`; a notebook that was never run is read from top to bottom.

    Raises:
        UsageError: it is not a notebook.
    """
    try:
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a notebook; expected an .ipynb file.") from None
    ran = [cell for cell in cells if cell.get("execution_count")]
    ordered = sorted(ran, key=lambda cell: int(cell["execution_count"])) if ran else cells
    facts, entries = SessionFacts(), list[ExecutedCell | PushedValues]()
    auto: str | None = None
    for cell in ordered:
        source = "".join(cell["source"])
        for line in source.splitlines():
            words = _words(line)
            if words[:1] == ["%distributed"] and words[1:2] and words[1] in _RESET_COMMANDS:
                facts = _facts(words[2:], facts) if words[1] == "start" else facts
                entries = [entry for entry in entries if isinstance(entry, ExecutedCell) and not entry.magic]
            elif words[:2] == ["%distributed", "config"]:
                facts = _configured(words[2:], facts)
            elif words[:2] == ["%distributed", "auto"]:
                auto = " ".join(words[3:]) if words[2:3] == ["on"] else None
        facts = _facts_from_outputs(cell, facts)
        entry = _entry(cell, source, auto=auto)
        pushes = pushes_in(entry.code) if entry.outcome == "ok" else []
        entries += [*pushes, entry] if entry.magic else [entry, *pushes]
    return facts, entries


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _facts(words: list[str], before: SessionFacts) -> SessionFacts:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-n", type=int, default=before.num_ranks)
    parser.add_argument("--backend", default="gloo")
    options = parser.parse_known_args(words)[0]
    backend = options.backend if options.backend != "auto" else "gloo"
    return SessionFacts(options.n, backend, before.threads, backend == "nccl")


def _facts_from_outputs(cell: dict[str, Any], before: SessionFacts) -> SessionFacts:
    """Update the facts about the ranks from a cell's outputs."""
    for output in cell.get("outputs", ()):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            before = SessionFacts.from_json(output["metadata"]["axon_nb"])
        if match := _AUTO_STARTED.search("".join(output.get("text", ""))):
            before = SessionFacts(int(match[1]), match[2], before.threads, match[2] == "nccl")
    return before


def _configured(words: list[str], before: SessionFacts) -> SessionFacts:
    for word in words:
        key, _, value = word.partition("=")
        if key == "threads" and value.isdigit():
            return SessionFacts(before.num_ranks, before.backend, int(value), before.on_gpus)
    return before


def _entry(cell: dict[str, Any], source: str, *, auto: str | None) -> ExecutedCell:
    number = cell.get("execution_count")
    first, _, rest = source.lstrip("\n").partition("\n")
    name = first[2:].partition(" ")[0].strip() if first.startswith("%%") else ""
    on_ranks = name in _ON_RANKS
    lines = [line for line in source.splitlines() if line.strip()]
    if not on_ranks and auto is not None and not name and any(not line.lstrip().startswith("%") for line in lines):
        on_ranks, first, rest = True, f"%%distributed {auto}", source
    outcome, line, error = _outcome(cell, number)
    if line is not None and not name:
        line += 1  # the cell was sent without a magic's first line
    magic = first[2:].strip() if on_ranks else ""
    code = rest if on_ranks or name == "local" else source
    return ExecutedCell(number, magic, code, outcome, line, error)


def _outcome(cell: dict[str, Any], number: int | None) -> tuple[str, int | None, str]:
    for output in cell.get("outputs", ()):
        if output.get("output_type") == "error":
            text = (str(output.get("evalue", "")).splitlines() or [""])[0] or str(output.get("ename", ""))
            if output.get("ename") in _INTERRUPTED:
                return "interrupted", None, text
            return "failed", failed_line("\n".join(output.get("traceback", ())), number), text
    return "ok", None, ""
