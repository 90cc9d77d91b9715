"""The solved edition of the course runs on real ranks from top to bottom, and every check passes there."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.course_runs import NOTEBOOKS, run_solved

pytestmark = pytest.mark.timeout(900)

IN_EVERY_RUN = ("01_one_program", "04_data_parallelism", "11_bug_hunt")
"""The others run in `make soak`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in NOTEBOOKS]
)
def test_solved_notebook_runs_and_passes_its_checks(name: str, tmp_path: Path) -> None:
    run = run_solved(name, tmp_path)
    assert not run.failed
    assert run.peak_mib > 0
