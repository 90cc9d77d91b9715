"""The wording of a failed cell."""

from __future__ import annotations

from axon_nb.cluster.failures.report import RankError, cell_error


def test_several_ranks_that_died_alike_are_in_the_plural() -> None:
    errors = {rank: RankError(rank, "died", "", "was killed by SIGKILL") for rank in (1, 2)}
    assert str(cell_error(errors, first=[2, 1])) == "ranks 1-2 were killed by SIGKILL"
    assert str(cell_error({1: errors[1]}, first=[1])) == "rank 1 was killed by SIGKILL"
