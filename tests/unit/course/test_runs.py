"""The table of how long the solved notebooks take, and what counts as a notebook that went wrong."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest

from scripts.course_runs import NOTEBOOKS, first_wrong_cell, render

PASSED = "8.2 A title: choice, mock world\n  ✓ one thing\nA step\n  rank 0  ██··▓▓\n  █ forward  · waiting"


def notebook(source: str, *outputs: Any, planted: bool = False) -> nbformat.NotebookNode:
    """A notebook of one cell that has run."""
    cell = nbformat.v4.new_code_cell(source, outputs=list(outputs))
    cell.metadata["tags"] = ["raises-exception"] if planted else []
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Text"), cell])


def shown(text: str) -> Any:
    """What a check displays."""
    return nbformat.v4.new_output("execute_result", data={"text/plain": text}, execution_count=1)


def raised() -> Any:
    """The output of a cell that fails."""
    return nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])


@pytest.mark.parametrize(
    "sound",
    [notebook("x = 1"), notebook("all_reduce()", raised(), planted=True), notebook('check("8.2")', shown(PASSED))],
)
def test_notebook_that_did_what_it_should_has_no_wrong_cell(sound: nbformat.NotebookNode) -> None:
    assert first_wrong_cell(sound) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        notebook("x = 1", raised()),
        notebook("all_reduce()", planted=True),
        notebook('check("8.2")', shown(PASSED.replace("A step", "  ✗ another"))),
        notebook('check("8.2")', shown(PASSED.replace("A step", "  · another"))),
        notebook('check("8.2")', shown("  ✓ one thing\n  Not yet: replace the `...`")),
        notebook('check("8.2")'),
    ],
)
def test_wrong_cell_is_named(wrong: nbformat.NotebookNode) -> None:
    assert first_wrong_cell(wrong).startswith(wrong.cells[1].source)


def test_page_has_a_table_for_each_machine_and_marks_what_is_over() -> None:
    row = {"date": "2026-01-01", "notebook": "01_one_program", "load": "0.1", "failed": ""}
    rows = [
        {**row, "machine": "small", "seconds": "200.4", "peak_mib": "1700"},
        {**row, "machine": "large", "seconds": "59.6", "peak_mib": "900", "failed": 'not: check("1.1")'},
    ]
    lines = render(rows).splitlines()
    assert "| 01_one_program | 200 (over) | 1,700 MiB (over) | 0.1 | all hold | 2026-01-01 |" in lines
    assert '| 01_one_program | 60 | 900 MiB | 0.1 | not: check("1.1") | 2026-01-01 |' in lines
    assert lines.index("## small") < lines.index("## large")
    assert f"1 of {len(NOTEBOOKS)} notebooks: 3 minutes in all, 1,700 MiB at most." in lines
