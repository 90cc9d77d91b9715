"""Runs a cell on all ranks and on one, from the same state, and returns what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axon_nb.cluster.comparison.verdict import Verdict, verdict
from axon_nb.errors import UsageError
from axon_nb.records.protocol.inspection import BeginComparison, CompareRanks, EndComparison, PrepareComparison
from axon_nb.records.protocol.messages import cell_source
from axon_nb.records.training.comparison import Comparison

if TYPE_CHECKING:
    from axon_nb.cluster.cells.driver import RunsCell
    from axon_nb.cluster.cluster import Cluster


async def compare(cluster: Cluster, run: RunsCell, code: str, options: dict[str, Any], *, plain: str) -> Verdict:
    """Run the cell on all ranks and on one, and compare what they compute; the state from before is restored.

    Args:
        cluster: The cluster.
        run: Runs a cell on it.
        code: The cell; its first line is the comment that stands for the magic.
        options: The options of `Cluster.run`, with the ranks as a list.
        plain: Name of the plain model that stands for one that is split over ranks; empty: each rank has all of it.

    Raises:
        UsageError: the cell cannot be compared; says what to do.
    """
    state = cluster.state
    if state.world_size < 2:
        raise UsageError("--compare needs at least 2 ranks: `%distributed start -n 2`.")
    if list(options["ranks"]) != list(state.ranks):
        raise UsageError("--compare runs the cell on all ranks: leave --ranks out.")
    if plain and not plain.isidentifier():
        raise UsageError(f"--compare {plain}: must be the name of a variable.")
    _, newline, body = code.partition("\n")
    options = {**options, "values": False, "show_value": False}
    inside = {**options, "quiet": True, "values": True}
    prepared = await run(cell_source(PrepareComparison(code=body, plain=plain)), **inside)
    if problem := next(filter(None, prepared.values.values()), ""):
        raise UsageError(str(problem))
    begin, end = cell_source(BeginComparison()), cell_source(EndComparison())
    await run(f"{begin}{newline}{body}\n{end}", **{**options, "restores": True})
    reference = await run(cell_source(CompareRanks()), **{**inside, "ranks": [0], "restores": True})
    result = reference.values[0]
    assert isinstance(result, Comparison)
    if result.problem:
        raise UsageError(result.problem)
    if result.random:
        raise UsageError(
            f"{result.random} draws random numbers, so no two runs are alike: draw them in an earlier cell, or switch "
            "them off (layers of the class Dropout may stay)."
        )
    return verdict(result, 1 if plain else state.world_size)
