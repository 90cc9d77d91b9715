"""Export of a notebook's `%%distributed` cells as one script for torchrun."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axon_nb.errors import UsageError
from axon_nb.export.script import data_file, make_script
from axon_nb.export.steps import History, read_notebook
from axon_nb.export.translation import apply_ruff
from axon_nb.records.history import SessionFacts
from axon_nb.records.units import format_bytes

__all__ = ["ExportReport", "export_history", "export_notebook"]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote; its text is the summary shown to the user."""

    target: Path
    """The script."""
    num_ranks: int
    """Number of ranks that the script runs on."""
    data: Path | None
    """The file beside it with pushed values; None if there are none."""
    paths: tuple[str, ...]
    """Variables with unknown values: for each the script has an option that names a file."""
    omitted: int
    """Number of dead cells that were omitted."""
    undefined: tuple[str, ...] = ()
    """Names that the script uses but does not define, according to ruff."""
    commands: tuple[str, ...] = ()
    """Lines of the notebook that gave ranks values which the script does not have, such as `%distributed load`."""

    def __str__(self) -> str:
        lines = [f"Wrote {self.target}: torchrun --nproc-per-node {self.num_ranks} {self.target}"]
        if self.data is not None:
            lines.append(f"Wrote {self.data} ({format_bytes(self.data.stat().st_size)}): the pushed values.")
        if self.paths:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in self.paths)
            lines.append(f"Unknown values, to be passed as files: {options}.")
        if self.omitted:
            cells = "1 cell" if self.omitted == 1 else f"{self.omitted} cells"
            lines.append(
                f"Omitted {cells} that nothing later depends on; if they drew random numbers, later draws differ."
            )
        if self.commands:
            lines.append(f"Not in the script, so values may differ from here on: {', '.join(self.commands)}.")
        if self.undefined:
            lines.append(f"Undefined names in the script: {', '.join(self.undefined)}.")
        return "\n".join(lines)

    __repr__ = __str__


def export_notebook(source: Path, target: Path, *, live_only: bool = False, force: bool = False) -> ExportReport:
    """Export a notebook file.

    Args:
        source: The `.ipynb` file.
        target: The script.
        live_only: Whether to omit cells that the notebook's final state does not depend on.
        force: Whether to overwrite existing files.

    Raises:
        UsageError: it is not a notebook, no cell ran on ranks, or the script exists.
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
    """Export a running session; see `export_notebook`.

    Args:
        history: Cells and pushes, in order.
        facts: Facts about the ranks.
        values: Pushed variables that still exist in the notebook.
        target: The script.
        live_only: Whether to omit cells that the session's final state does not depend on.
        force: Whether to overwrite existing files.
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
        raise UsageError(f"{target}: the script's name must end in .py.")
    # What the notebook itself defines is pickled by its name there, which the script does not know: it gets the code.
    values = {name: value for name, value in values.items() if getattr(value, "__module__", "") != "__main__"}
    script = make_script(history, facts, title=title, file_name=target.name, values=values, live_only=live_only)
    data = target.with_name(data_file(target.name)) if script.file_names else None
    existing = [path for path in (target, data) if path is not None and path.exists()]
    if existing and not force:
        raise UsageError(f"{existing[0]} already exists; use `--force` to overwrite it.")
    text, undefined = apply_ruff(script.text, target)
    if data is not None:
        _save(data, {name: values[name] for name in script.file_names})
    _replace(target, text.encode())
    return ExportReport(target, facts.num_ranks, data, script.paths, script.omitted, tuple(undefined), script.commands)


def _save(path: Path, values: Mapping[str, Any]) -> None:
    try:
        content = pickle.dumps(values, protocol=5)
    except Exception as error:
        raise UsageError(f"Cannot write {', '.join(values)} to a file: {type(error).__name__}: {error}") from None
    _replace(path, content)


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}.") from None
    finally:
        draft.unlink(missing_ok=True)
