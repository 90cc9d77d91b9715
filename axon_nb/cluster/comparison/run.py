"""Runs a cell on all ranks and on one, from the same state, and returns what differs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.comparison.verdict import Verdict, verdict
from axon_nb.errors import UsageError
from axon_nb.records.protocol.inspection import BeginComparison, CompareRanks, EndComparison, PrepareComparison
from axon_nb.records.protocol.messages import cell_source
from axon_nb.records.training.comparison import Comparison

if TYPE_CHECKING:
    from axon_nb.cluster.cells.result import CellResult
    from axon_nb.cluster.cluster import Cluster
    from axon_nb.cluster.state import ClusterState

__all__ = ["compare", "compare_blocking"]


async def compare(cluster: Cluster, code: str, plain: str, options: dict[str, Any]) -> Verdict:
    """Run the cell on all ranks and on one, and compare what they compute; the state from before is restored.

    Args:
        cluster: The cluster.
        code: The cell; its first line is the comment that stands for the magic.
        plain: Name of the plain model that stands for one that is split over ranks; empty: each rank has all of it.
        options: The options of `Cluster.run`, with the ranks as a list.

    Raises:
        UsageError: the cell cannot be compared; says what to do.
    """
    return await _compare(cluster.state, cluster.run_async, code, plain, options)


def compare_blocking(cluster: Cluster, code: str, plain: str, options: dict[str, Any]) -> Verdict:
    """Do what `compare` does, without an event loop."""

    async def run(code: str, **options: Any) -> CellResult:
        return cluster.run(code, **options)

    coroutine = _compare(cluster.state, run, code, plain, options)
    try:
        coroutine.send(None)  # it never waits
    except StopIteration as end:
        result: Verdict = end.value
        return result
    raise AssertionError


async def _compare(
    state: ClusterState, run: Callable[..., Awaitable[CellResult]], code: str, plain: str, options: dict[str, Any]
) -> Verdict:
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
    return verdict(result)
