"""Every check accepts its solution, refuses each wrong answer with its sentence, and says "not yet" to a stub."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from axon_course.answers import unpack
from axon_course.checks import CheckResult, run_check
from axon_course.definitions import Exercise, all_exercises, find_exercise
from scripts.build_course import SOURCES, stub

EXERCISES = {exercise.id: exercise for exercise in all_exercises()}
WRONG = sorted((SOURCES / "wrong").glob("*/*.py"))
REFUSED = "# refused: "


def exercise_of(path: Path) -> str:
    """The id of a file such as `2_2_off_by_one.py`."""
    return ".".join(path.stem.split("_")[:2])


def checked(exercise: Exercise, source: str, seed: int = 7) -> CheckResult:
    """The result of a check of a cell's source."""
    names: dict[str, Any] = {"__name__": "__main__"}
    lines = [line for line in source.splitlines() if not line.startswith(("%", "check("))]
    exec(compile("\n".join(lines), f"<{exercise.id}>", "exec", dont_inherit=True), names)
    return run_check(exercise, names.get(exercise.answer), seed=seed)


@functools.cache
def refused(path: Path) -> CheckResult:
    """The result of the check of a wrong answer."""
    return checked(find_exercise(exercise_of(path)), path.read_text(encoding="utf-8"))


def source_of(exercise_id: str) -> str:
    """The cell of an exercise with its markers, without the comments that make it py:percent."""
    marker = f"### BEGIN SOLUTION {exercise_id}\n"
    (cell,) = [
        cell
        for path in SOURCES.glob("[0-9]*.py")
        for cell in path.read_text(encoding="utf-8").split("\n# %%")
        if marker in cell
    ]
    return cell.partition("\n")[2].replace("# %%distributed", "%%distributed")


@pytest.mark.parametrize("exercise_id", EXERCISES)
@pytest.mark.parametrize("seed", [0, 1])
def test_solution_passes(exercise_id: str, seed: int) -> None:
    result = checked(EXERCISES[exercise_id], unpack(exercise_id), seed)
    assert result.passed, repr(result)
    assert (result.replay is not None) == (EXERCISES[exercise_id].score is not None)


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_wrong_answer_is_refused_with_its_sentence(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith(REFUSED)
    result = refused(path)
    assert not result.passed
    assert not result.not_yet
    assert text.splitlines()[0].removeprefix(REFUSED) in repr(result)


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_untouched_stub_is_not_yet_an_answer(exercise_id: str) -> None:
    exercise = EXERCISES[exercise_id]
    result = checked(exercise, stub(source_of(exercise_id)))
    assert result.not_yet
    assert not result.passed
    assert "Not yet" in repr(result)
    assert all(line.state == "open" for line in result.lines)


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_exercise_is_complete(exercise_id: str) -> None:
    exercise = EXERCISES[exercise_id]
    assert len([path for path in WRONG if exercise_of(path) == exercise_id]) >= 3
    assert len(exercise.properties) >= 2
    assert all(len(hint) > 20 for hint in exercise.hints)
    assert len({entry.name for entry in exercise.properties}) == len(exercise.properties)


def test_known_mistakes_are_recognized_in_a_wrong_answer() -> None:
    seen = {refused(path).mistake for path in WRONG}
    unseen = [
        mistake.sentence
        for exercise in EXERCISES.values()
        for mistake in exercise.mistakes
        if mistake.sentence not in seen
    ]
    assert not unseen, "no file in course/wrong makes these mistakes"
