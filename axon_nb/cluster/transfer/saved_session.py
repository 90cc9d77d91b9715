"""Write the session of all ranks to a folder, and load it, on the same number of ranks or on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axon_nb.cluster.cells.manager import CellManager
from axon_nb.cluster.failures.hints import hint_for
from axon_nb.cluster.failures.report import cell_error, root_cause
from axon_nb.errors import UsageError
from axon_nb.records.protocol.messages import RankCall, cell_source
from axon_nb.records.protocol.transfer import LoadedSession, LoadSession, SavedSession, SaveSession
from axon_nb.records.units import format_bytes


def save_session(cells: CellManager, folder: str) -> str:
    """Write the state of all ranks to a folder; return a report.

    Args:
        cells: The cells of the cluster.
        folder: Its path, on a disk that all ranks see; a session that was saved there is replaced.

    Raises:
        UsageError: that is not possible.
    """
    path = Path(folder).expanduser().absolute()
    saved: dict[int, SavedSession] = _call(cells, SaveSession(str(path)))
    first = saved[0]
    lines = [f"Saved the session of {cells.state.world_size} ranks to {folder} ({format_bytes(first.bytes)})."]
    if first.models:
        lines.append(f"Other numbers of ranks can load {_names(first.models)}.")
    lines += [f"Only as many ranks can load `{name}`: {reason}." for name, reason in first.not_portable.items()]
    left_out = {name: reason for one in saved.values() for name, reason in one.left_out.items()}
    return "\n".join([*lines, *(f"Not saved: `{name}` {reason}." for name, reason in left_out.items())])


def load_session(cells: CellManager, folder: str) -> str:
    """Load what `save_session` has written; return a report.

    On as many ranks, everything comes back: variables, training states and random states. On another number, models
    and their optimizers and schedulers do; the cells that create them must have run.

    Args:
        cells: The cells of the cluster.
        folder: The path.

    Raises:
        UsageError: that is not possible.
    """
    loaded: LoadedSession = _call(cells, LoadSession(str(Path(folder).expanduser().absolute())))[0]
    size = cells.state.world_size
    if loaded.world_size == size:
        return f"Loaded the session from {folder}: all variables and random states of {size} ranks."
    what = _names(loaded.models) if loaded.models else "no model"
    return (
        f"Loaded {what} from {folder}, which {loaded.world_size} ranks have saved. Other variables and random states "
        f"stay as they are: they belong to {loaded.world_size} ranks."
    )


def _names(models: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in models)


def _call(cells: CellManager, call: RankCall[Any]) -> dict[int, Any]:
    # It runs as a cell, so that a death, an interrupt or a failure aborts it like any other cell.
    result = cells.run(cell_source(call), quiet=True, check=False)
    if not result.errors:
        return dict(result.values)
    cause = root_cause(result.errors)
    if cause.kind != "raised":
        raise cell_error(result.errors, first=(), hint=hint_for(result.errors.values()))
    raise UsageError(cause.evalue if "Checkpoint" in cause.ename else str(cause))
