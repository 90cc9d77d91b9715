"""The editions of the course, and the table of how long the solved notebooks take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from axon_course.answers import FILE, unpack
from axon_course.definitions import all_exercises
from axon_course.program import copy_course
from axon_nb.errors import UsageError
from scripts.build_course import SOURCES, main, stub
from scripts.course_runs import NOTEBOOKS, first_wrong_cell, render

EXERCISES = [exercise.id for exercise in all_exercises()]
STUDENT = sorted((SOURCES / "student").glob("*.ipynb"))

PASSED = "8.2 A title: choice, mock world\n  ✓ one thing\nA step\n  rank 0  ██··▓▓\n  █ forward  · waiting"


def test_student_edition_and_packed_solutions_are_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_outdated_edition_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--edition", "solved", str(tmp_path)]) == 0
    first = min(tmp_path.glob("*.ipynb"))
    first.write_text("{}")
    assert main(["--edition", "solved", "--check", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"out of date: {first.name}; run `make notebooks`\n"


@pytest.mark.parametrize("path", STUDENT, ids=lambda path: path.stem)
def test_student_edition_holds_no_solution(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    assert not any("SOLUTION" in source for source in cells)
    for exercise_id in EXERCISES:
        if f'check("{exercise_id}")' in "\n".join(cells):
            assert unpack(exercise_id) not in cells
            assert f'hint("{exercise_id}")' not in FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_every_exercise_is_checked_in_a_notebook(exercise_id: str) -> None:
    number = int(exercise_id.partition(".")[0])
    (path,) = SOURCES.glob(f"{number:02d}_*.py")
    assert f'\ncheck("{exercise_id}")\n' in path.read_text(encoding="utf-8")


def test_stub_keeps_the_indentation_and_names_values() -> None:
    body = "def f(x):\n    ### BEGIN SOLUTION 1.1\n    return x\n    ### END SOLUTION\n"
    assert stub(body) == "def f(x):\n    raise NotImplementedError  # your lines\n"
    value = "### BEGIN SOLUTION 1.1\norder = [1]\n### END SOLUTION"
    assert stub(value) == "order = ...  # your answer"


def test_nbgrader_edition_marks_answers_and_tests(tmp_path: Path) -> None:
    assert main(["--edition", "nbgrader", str(tmp_path)]) == 0
    cells = [cell for path in tmp_path.glob("*.ipynb") for cell in nbformat.read(path, as_version=4).cells]
    graded = {cell.metadata["nbgrader"]["grade_id"]: cell for cell in cells if "nbgrader" in cell.metadata}
    for exercise in all_exercises():
        number = exercise.id.replace(".", "-")
        answer, test = graded[f"answer-{number}"], graded[f"check-{number}"]
        assert "### BEGIN SOLUTION" in answer.source
        assert answer.metadata["nbgrader"]["solution"]
        assert test.source == f'assert check("{exercise.id}").passed'
        assert test.metadata["nbgrader"]["points"] == len(exercise.properties)


def test_copied_course_keeps_changed_notebooks(tmp_path: Path) -> None:
    folder = tmp_path / "learn"
    assert "kept" not in copy_course(folder)
    first = folder / STUDENT[0].name
    first.write_text("mine")
    assert f"Changed, and kept as they are: {first.name}." in copy_course(folder)
    assert first.read_text() == "mine"
    assert [path.name for path in sorted(folder.glob("*.ipynb"))] == [path.name for path in STUDENT]
    assert "tutor" in (folder / "AGENTS.md").read_text()


def test_folder_that_cannot_be_written_is_refused_with_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="name another folder"):
        copy_course(tmp_path / "file")


def test_command_copies_the_course(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "axon_nb.cli", "course", "learn"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(STUDENT)} notebooks are in learn. Start with `jupyter lab learn/")
    assert len(list((tmp_path / "learn").glob("*.ipynb"))) == len(STUDENT)


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
