"""Runs the properties of an exercise, in order, until one fails."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from types import CodeType
from typing import Any, Literal

from axon_course.definitions import Exercise
from axon_course.replays import Replay
from axon_course.trials import LiveTrial, NotYetError, RankFailedError, Trial
from axon_nb.records.colors import STATES

_MARKS = {"held": "✓", "failed": "✗", "open": "·"}
_WORDS = {"held": "holds", "failed": "does not hold", "open": "not looked at"}
_OF_CELLS = {"rank": "`dist.get_rank()`", "world_size": "`dist.get_world_size()`"}
"""What an answer may call instead of the names that only cells have."""


@dataclass(frozen=True, slots=True)
class Line:
    """What was seen of one property."""

    name: str
    state: Literal["held", "failed", "open"]
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check; displays as one line per property."""

    exercise: str
    title: str
    answer: str
    where: str
    """Such as ``mock world of 4 ranks``."""
    lines: tuple[Line, ...]
    not_yet: str = ""
    """Why nothing was looked at; empty if it was."""
    mistake: str = ""
    """The known mistake that the answer makes; empty if none is recognized."""
    score: str = ""
    """Of a puzzle: the score, and the best known."""
    replay: Replay | None = None
    """Of a puzzle: what the answer did, up to its failure; None if there is nothing to show."""
    on_ranks: bool = False
    """Whether there is nothing left to check on real ranks."""

    @property
    def passed(self) -> bool:
        """Whether all properties hold."""
        return not self.not_yet and all(line.state == "held" for line in self.lines)

    @property
    def next_step(self) -> str:
        """What to do next."""
        if self.not_yet:
            return f'Write it, then run this cell again. Stuck? `hint("{self.exercise}")`'
        if not self.passed:
            return f'`hint("{self.exercise}")` gives the first of three hints.'
        return "" if self.on_ranks else f'On real ranks: `check("{self.exercise}", on="ranks")`'

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for line in self.lines:
            yield line.state, line.name, line.sentence

    def __repr__(self) -> str:
        width = max((len(line.name) for line in self.lines), default=0)
        head = f"{self.exercise} {self.title}: {self.answer}, {self.where}"
        rows = [f"  {_MARKS[state]} {name:<{width}}  {text}".rstrip() for state, name, text in self._rows()]
        first = [self.not_yet and f"  Not yet: {self.not_yet}", self.mistake and f"  {self.mistake}"]
        remarks = [self.score, *([repr(self.replay)] if self.replay else []), self.next_step]
        return "\n".join([head, *filter(None, first), *rows, *filter(None, remarks)])

    def _repr_html_(self) -> str:
        from axon_nb.widgets.html import CELL, MUTED, WRAPPED_CELL, figure, note_lines, notice, table, table_row

        paints = {"held": STATES["ok"][0].both, "failed": STATES["error"][0].both, "open": "inherit"}
        rows = [
            table_row(
                f'<td style="{CELL};color:{paints[state]}"><b title="{_WORDS[state]}">{_MARKS[state]}</b></td>',
                f'<td style="{CELL}">{escape(name)}</td>',
                f'<td style="{WRAPPED_CELL}">{escape(text)}</td>',
            )
            for state, name, text in self._rows()
        ]
        remarks = notice("Not yet:", self.not_yet) if self.not_yet else ""
        remarks += notice("", self.mistake) if self.mistake else ""
        beside = f' <span style="{MUTED}">{escape(self.answer)}, {escape(self.where)}</span>'
        picture = self.replay._repr_html_() if self.replay else ""
        body = remarks + table((), rows) + note_lines(filter(None, [self.score])) + picture
        body += note_lines(filter(None, [self.next_step]))
        return figure(body, heading=f"{self.exercise} {self.title}", beside=beside)


def run_check(exercise: Exercise, answer: Any, *, seed: int, on_ranks: bool = False) -> CheckResult:
    """Check an answer.

    Args:
        exercise: The exercise.
        answer: What the notebook has bound to its name; None: nothing.
        seed: Decides on the random cases.
        on_ranks: Whether to run it on the notebook's ranks; if the notebook has no answer, on the ranks' own.

    Raises:
        NoClusterError: no ranks are running, with `on_ranks`.
    """
    trial = (
        LiveTrial(exercise.answer, answer, seed=seed) if on_ranks else Trial(answer, ranks=exercise.ranks, seed=seed)
    )
    properties = [entry for entry in exercise.properties if not (on_ranks and entry.mock_only)]
    has_ranks = not all(entry.mock_only for entry in exercise.properties)
    where = (
        f"{trial.ranks} real ranks"
        if on_ranks
        else f"mock world of {trial.ranks} ranks"
        if has_ranks
        else "this notebook"
    )
    lines: list[Line] = []
    not_yet, mistake, score = "", "", ""
    if (answer is None or answer is Ellipsis) and not on_ranks:
        not_yet = f"run the cell that defines {exercise.answer}" if answer is None else "replace the `...`"
    try:
        for entry in properties if not not_yet else ():
            sentence = _examine(entry.test, trial, exercise.answer)
            lines.append(Line(entry.name, "failed" if sentence else "held", sentence or ""))
            if sentence:
                mistake = _known_mistake(exercise, trial)
                break
    except NotYetError:
        not_yet = f"replace `raise NotImplementedError` in {exercise.answer} by your own lines"
    lines += [Line(entry.name, "open") for entry in properties[len(lines) :]]
    if exercise.score and not not_yet and all(line.state == "held" for line in lines):
        score = f"{exercise.score.name}: {exercise.score.measure(trial):g}; the best known is {exercise.score.best:g}."
    return CheckResult(
        exercise.id,
        exercise.title,
        exercise.answer,
        where,
        tuple(lines),
        not_yet,
        mistake,
        score,
        None if not_yet else _replay(exercise, trial, has_failed=any(line.state == "failed" for line in lines)),
        on_ranks or not has_ranks,
    )


def _replay(exercise: Exercise, trial: Trial, *, has_failed: bool) -> Replay | None:
    """Return what a puzzle's answer does; None if it fails before there is anything to show."""
    if exercise.score is None or (has_failed and isinstance(trial, LiveTrial)):  # it would make the ranks fail again
        return None
    try:
        return exercise.score.replay(trial)
    except Exception:  # a wrong answer may fail in any way; its check has said how
        return None


def _examine(test: Any, trial: Trial, name: str) -> str | None:
    """Return what a property says, or the answer's own error as a sentence."""
    try:
        sentence: str | None = test(trial)
    except NotYetError:
        raise
    except RankFailedError as error:
        return str(error)
    except Exception as error:
        return _describe(error, trial.answer, name)
    return sentence


def _describe(error: Exception, answer: Any, name: str) -> str:
    """Return an error with its line in the learner's code, and the rank on which it was raised."""
    codes = list(_codes(answer, name))
    rank = next((note.split(" of ")[0] for note in getattr(error, "__notes__", ()) if "raised on rank" in note), "")
    own = []
    for frame in traceback.extract_tb(error.__traceback__):
        within = [(code, label) for code, label in codes if code.co_filename == frame.filename]
        before = [(code.co_firstlineno, label) for code, label in within if code.co_firstlineno <= (frame.lineno or 0)]
        if before:
            first, label = max(before)
            own.append((label, (frame.lineno or 0) - first + 1))
    line = f" in line {own[-1][1]} of {own[-1][0]}" if own else ""
    message = str(error) or "no message"
    if "Deadlock" in message:
        return message
    if isinstance(error, NameError) and error.name in _OF_CELLS:
        message += f"; it exists in cells on ranks, and {_OF_CELLS[error.name]} says it everywhere"
    return f"{rank.replace('raised on ', '') or 'it'} raised {type(error).__name__}{line}: {message}"


def _codes(answer: Any, name: str) -> Iterator[tuple[CodeType, str]]:
    """Yield the code of a function, or of each method of a class, with what to call it."""
    if isinstance(answer, type):
        for label, method in vars(answer).items():
            if inspect.isfunction(method):
                yield method.__code__, f"{name}.{label}"
    elif inspect.isfunction(answer):
        yield answer.__code__, name


def _known_mistake(exercise: Exercise, trial: Trial) -> str:
    for mistake in exercise.mistakes:
        try:
            if mistake.fits(trial):
                return mistake.sentence
        except Exception:  # the answer fails in this case, so it makes another mistake
            continue
    return ""
