"""The wording of a failed cell."""

from __future__ import annotations

from axon_nb.cluster.failures.report import RankError, cell_error


def test_several_ranks_that_died_alike_are_in_the_plural() -> None:
    errors = {rank: RankError(rank, "died", "", "was killed by SIGKILL") for rank in (1, 2)}
    assert str(cell_error(errors, first=[2, 1])) == "ranks 1-2 were killed by SIGKILL"
    assert str(cell_error({1: errors[1]}, first=[1])) == "rank 1 was killed by SIGKILL"


def test_others_that_were_aborted_alike_are_in_the_plural() -> None:
    errors = {rank: RankError(rank, "aborted", "KeyboardInterrupt", "was interrupted at line 3") for rank in (0, 1)}
    errors[2] = RankError(2, "raised", "ValueError", "x", ("ValueError: x",))
    lines = cell_error(errors, first=[2])._render_traceback_()
    assert lines[-1] == "[ranks 0-1] were interrupted at line 3"
