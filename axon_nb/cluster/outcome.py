"""How a cell that is over has failed, as the exception that the notebook raises."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.cluster.cell import CellRun
from axon_nb.cluster.cuda_errors import context_hint
from axon_nb.cluster.failures import cell_error, interrupt_error
from axon_nb.cluster.hints import hint_for

__all__ = ["failure_of"]


def failure_of(run: CellRun, replaced: Sequence[str], *, way_back: str) -> BaseException | None:
    """The exception; None when the cell did not fail.

    Args:
        run: The cell.
        replaced: What was told of ranks that had to be replaced to end it.
        way_back: What gives a dead or stuck rank back, as a sentence.
    """
    if run.interrupted_at is not None:
        return interrupt_error(run.errors, run.ranks, replaced)
    if not run.errors and not run.explanation:
        return None
    return cell_error(
        run.errors,
        first=run.failed_order,
        explanation=run.explanation,
        hint=context_hint(run.errors) or hint_for(run.errors.values(), way_back=way_back),
        timeout_s=run.timeout_s if run.timed_out else None,
    )
