"""The wording of a failed cell."""

from __future__ import annotations

from axon_nb.cluster.failures import RankError, cell_error, interrupt_error


def test_several_equal_deaths_use_the_plural() -> None:
    errors = {rank: RankError(rank, "died", "", "was killed by SIGKILL") for rank in (1, 2)}
    assert str(cell_error(errors, first=[2, 1])) == "ranks 1-2 were killed by SIGKILL"
    assert str(cell_error({1: errors[1]}, first=[1])) == "rank 1 was killed by SIGKILL"


def test_several_stuck_ranks_use_the_plural() -> None:
    reason = "is still in C code at line 2 and does not react to interrupts"
    errors = {rank: RankError(rank, "stuck", "", reason) for rank in range(3)}
    lines = interrupt_error(errors, range(4))._render_traceback_()
    assert "[ranks 0-2] are still in C code at line 2 and do not react to interrupts" in lines
    lines = interrupt_error({0: errors[0]}, range(4))._render_traceback_()
    assert f"[rank 0] {reason}" in lines


def test_rank_errors_are_quoted_verbatim() -> None:
    errors = {0: RankError(0, "died", "", "was killed"), **{r: RankError(r, "raised", "", "is odd") for r in (1, 2)}}
    assert "[ranks 1-2] is odd" in cell_error(errors, first=[0])._render_traceback_()
