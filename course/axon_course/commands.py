"""What a notebook of the course calls: `check`, `hint`, `solution`, `progress`, `predict` and `measured`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

from axon_course.answers import locked_until, unpack
from axon_course.definitions import all_exercises, find_exercise
from axon_course.journal import Journal
from axon_nb.errors import UsageError

if TYPE_CHECKING:
    from axon_course.checks import CheckResult
    from axon_course.views import Guesses, Progress, Text


def check(exercise: str, *, on: Literal["mock", "ranks"] = "mock") -> CheckResult:
    """Check your answer to an exercise: what holds, and what does not. Time never counts.

    Args:
        exercise: Its id, such as ``2.2``.
        on: ``mock``: four pretend ranks in this process, where a hang is an error; ``ranks``: the real ones.

    Raises:
        UsageError: there is no such exercise.
        NoClusterError: no ranks are running.
    """
    from axon_course.checks import run_check

    if on not in ("mock", "ranks"):
        raise UsageError(f"on must be 'mock' or 'ranks'; got {on!r}.")
    task = find_exercise(exercise)
    journal = Journal()
    frame = inspect.currentframe()
    caller = frame.f_back if frame else None
    answer = caller.f_globals.get(task.answer) if caller else None
    result = run_check(task, answer, seed=journal.seed, on_ranks=on == "ranks")
    if not result.not_yet:
        entry = journal.entry(exercise)
        attempts = entry.get("attempts", 0) + 1
        journal.update(exercise, {"attempts": attempts, "passed": entry.get("passed", False) or result.passed})
        journal.report_to_class(
            {"exercise": exercise, "passed": result.passed, "attempt": attempts, "mistake": result.mistake}
        )
    return result


def hint(exercise: str) -> Text:
    """Show the next of three hints; after the third, all of them again.

    Raises:
        UsageError: there is no such exercise.
    """
    from axon_course.views import Text

    task = find_exercise(exercise)
    journal = Journal()
    seen = min(journal.entry(exercise).get("hints", 0) + 1, len(task.hints))
    journal.update(exercise, {"hints": seen})
    lines = [f"{number}. {text}" for number, text in enumerate(task.hints[:seen], start=1)]
    left = len(task.hints) - seen
    more = f"{left} more: call it again." if left else f'That was the last. solution("{exercise}") shows one answer.'
    return Text("\n".join([*lines, more]))


def solution(exercise: str, *, force: bool = False) -> Text:
    """Show an answer to an exercise, once a check of yours has looked at one.

    Args:
        exercise: Its id.
        force: Whether to show it before that.

    Raises:
        UsageError: there is no such exercise, it is untried, or a teacher keeps its solution locked.
    """
    from axon_course.views import Text

    find_exercise(exercise)
    if until := locked_until(exercise):
        raise UsageError(f"The solution of {exercise} is locked until {until:%d %B %Y}; hint({exercise!r}) is open.")
    if not force and not Journal().entry(exercise).get("attempts"):
        raise UsageError(
            f"Try {exercise} first: check({exercise!r}) has not looked at an answer of yours. "
            f"solution({exercise!r}, force=True) shows it anyway."
        )
    return Text(unpack(exercise), code=True)


def progress() -> Progress:
    """Show which exercises are done, tried and untouched."""
    from axon_course.views import Progress

    entries = Journal().read()
    return Progress(tuple((task.id, task.title, entries.get(task.id, {})) for task in all_exercises()))


def predict(question: str, **values: Any) -> Guesses:
    """Keep your guess, to be drawn beside what `measured` is given later.

    Args:
        question: Its id, such as ``2.a``.
        **values: Numbers or words by name; `...` stands for one that you have yet to replace.
    """
    from axon_course.views import Guesses

    guessed = {name: value for name, value in values.items() if value is not Ellipsis}
    if guessed:
        journal = Journal()
        journal.update(question, {"predicted": guessed})
        journal.report_to_class({"question": question, "predicted": guessed})
    return Guesses(question, guessed, {}, tuple(name for name in values if name not in guessed))


def measured(question: str, **values: Any) -> Guesses:
    """Draw what was measured beside what you guessed.

    Args:
        question: Its id, as in `predict`.
        **values: What was measured, by the names of the guess.
    """
    from axon_course.views import Guesses

    journal = Journal()
    journal.update(question, {"measured": values})
    return Guesses(question, journal.entry(question).get("predicted", {}), values, ())
