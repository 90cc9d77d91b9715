"""What a cell with `--compare` calls on the ranks, in the lines that the notebook adds to it."""

from __future__ import annotations

from axon_nb.engine.parity.comparer import Comparer
from axon_nb.engine.session import CellComparer, current
from axon_nb.records.training.comparison import Comparison


def prepare(code: str, plain: str) -> str:
    """Gather what the reference needs, on all ranks; return why the cell cannot be compared, or an empty text."""
    session = current()
    shell = session.kernel.shell
    session.comparer = comparer = Comparer(code, plain, shell.user_ns)
    return comparer.problem


def begin() -> None:
    """Observe the cell on this rank, until it ends or fails."""
    session = current()
    comparer, events = _running(), session.kernel.shell.events

    def close(*_: object) -> None:
        events.unregister("post_run_cell", close)
        comparer.close()

    events.register("post_run_cell", close)
    comparer.begin()


def end() -> None:
    """Send what was observed to rank 0; collective over all ranks."""
    _running().end()


def compare() -> Comparison:
    """Run the reference on this rank, which has observed nothing since `end`."""
    comparer = _running()
    try:
        return comparer.compare()
    finally:
        current().comparer = None


def _running() -> CellComparer:
    comparer = current().comparer
    assert comparer is not None, "prepare() comes first"
    return comparer
