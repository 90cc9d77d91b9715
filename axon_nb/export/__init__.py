"""The way out of the notebook: its `%%distributed` cells as one script for torchrun."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axon_nb.errors import UsageError
from axon_nb.export.head import data_file
from axon_nb.export.lint import settled
from axon_nb.export.reading import read_notebook
from axon_nb.export.script import make_script
from axon_nb.export.steps import History
from axon_nb.records.history import SessionFacts
from axon_nb.records.quantity import format_bytes

__all__ = ["ExportReport", "export_history", "export_notebook"]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export has written; its text says so."""

    target: Path
    """The script."""
    num_ranks: int
    """Ranks that it is meant for."""
    data: Path | None
    """The file beside it with values that the notebook had sent; None: there are none."""
    paths: tuple[str, ...]
    """Variables whose values nobody knows: each is an option of the script that names a file."""
    left_out: int
    """Cells that were left out as dead."""
    undefined: tuple[str, ...] = ()
    """Names that the script uses and nothing in it defines, as far as ruff can tell."""

    def __str__(self) -> str:
        lines = [f"Wrote {self.target}: torchrun --nproc-per-node {self.num_ranks} {self.target}"]
        if self.data is not None:
            lines.append(f"Wrote {self.data} ({format_bytes(self.data.stat().st_size)}): the values that were pushed.")
        if self.paths:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in self.paths)
            lines.append(f"Not known here, so the script wants files with them: {options}.")
        if self.left_out:
            cells = "1 cell" if self.left_out == 1 else f"{self.left_out} cells"
            lines.append(
                f"Left out {cells} that nothing later depends on; if they drew random numbers, later ones differ."
            )
        if self.undefined:
            lines.append(f"Used in the script and defined nowhere in it: {', '.join(self.undefined)}.")
        return "\n".join(lines)

    __repr__ = __str__


def export_notebook(source: Path, target: Path, *, live_only: bool = False, force: bool = False) -> ExportReport:
    """Write the script of a notebook file.

    Args:
        source: The `.ipynb`.
        target: The script.
        live_only: Whether cells that the notebook's end does not depend on are left out.
        force: Whether a file that is there is replaced.

    Raises:
        UsageError: it is no notebook, no cell has run on ranks, or the script is there already.
    """
    facts, history = read_notebook(source)
    return _write(history, facts, {}, target, title=source.name, live_only=live_only, force=force)


def export_history(
    history: History,
    facts: SessionFacts,
    values: Mapping[str, Any],
    target: Path,
    *,
    live_only: bool = False,
    force: bool = False,
) -> ExportReport:
    """Write the script of a running session; see `export_notebook`.

    Args:
        history: What was done, in order.
        facts: The ranks.
        values: Pushed variables that the notebook still has.
        target: The script.
        live_only: As there.
        force: As there.
    """
    return _write(history, facts, values, target, title="a notebook", live_only=live_only, force=force)


def _write(
    history: History,
    facts: SessionFacts,
    values: Mapping[str, Any],
    target: Path,
    *,
    title: str,
    live_only: bool,
    force: bool,
) -> ExportReport:
    if target.suffix != ".py":
        raise UsageError(f"{target}: a script's name ends in .py.")
    script = make_script(history, facts, title=title, file_name=target.name, values=values, live_only=live_only)
    data = target.with_name(data_file(target.name)) if script.file_names else None
    there = [path for path in (target, data) if path is not None and path.exists()]
    if there and not force:
        raise UsageError(f"{there[0]} is there already: `--force` replaces it.")
    text, undefined = settled(script.text, target)
    if data is not None:
        _save(data, {name: values[name] for name in script.file_names})
    _replace(target, text.encode())
    return ExportReport(target, facts.num_ranks, data, script.paths, script.left_out, tuple(undefined))


def _save(path: Path, values: Mapping[str, Any]) -> None:
    try:
        content = pickle.dumps(values, protocol=5)
    except Exception as error:
        raise UsageError(f"{', '.join(values)} cannot be written to a file: {type(error).__name__}: {error}") from None
    _replace(path, content)


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        draft.unlink(missing_ok=True)
