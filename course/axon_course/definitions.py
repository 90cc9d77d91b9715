"""What an exercise is made of, and where to find it by its id."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from axon_course.replays import Replay
from axon_course.trials import Trial
from axon_nb.errors import UsageError

_EXERCISES = "axon_course.exercises"


@dataclass(frozen=True, slots=True)
class Property:
    """One thing that holds for a right answer, which is one line of a check."""

    name: str
    """A few words that follow a mark: ``equals the sum``."""
    test: Callable[[Trial], str | None]
    """Runs the answer, its smallest case first; returns None, or a sentence about the first case that fails."""
    mock_only: bool = False
    """Whether real ranks skip it, as the same code decides it there."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong answer that learners are known to give."""

    sentence: str
    """What is wrong, in words that lead on without giving the answer away."""
    fits: Callable[[Trial], bool]
    """Whether the answer makes this mistake. Only asked after a property has failed; if it raises, it does not fit."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a puzzle minimizes."""

    name: str
    """Such as ``messages per rank``."""
    best: float
    """The lowest known."""
    measure: Callable[[Trial], float]
    """Runs a right answer."""
    replay: Callable[[Trial], Replay]
    """Runs an answer, and returns a picture of what the score counts; raises whatever a wrong answer raises."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """An exercise of a notebook; `course/axon_course/exercises/nbNN.py` lists those of notebook NN."""

    id: str
    """Notebook and number, such as ``2.2``."""
    title: str
    answer: str
    """The name that the notebook binds: of a function, a class or a value."""
    properties: Sequence[Property]
    hints: tuple[str, str, str]
    """From a nudge to nearly the answer."""
    mistakes: Sequence[Mistake] = ()
    score: Score | None = None
    ranks: int = 4
    """How many ranks the mock world has."""


def all_exercises() -> list[Exercise]:
    """Return the exercises of all notebooks, in order."""
    package = import_module(_EXERCISES)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name.startswith("nb"))
    return [exercise for name in names for exercise in import_module(f"{_EXERCISES}.{name}").EXERCISES]


def find_exercise(exercise_id: str) -> Exercise:
    """Return an exercise.

    Raises:
        UsageError: there is no such exercise.
    """
    found = {exercise.id: exercise for exercise in all_exercises()}
    if exercise_id not in found:
        raise UsageError(f"There is no exercise {exercise_id!r}; exercises: {', '.join(found)}.")
    return found[exercise_id]
