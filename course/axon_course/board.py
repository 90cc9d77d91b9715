"""`axon-nb class`: what a class has done, from the lines that checks append to a shared folder."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from axon_nb.errors import UsageError

_NUM_MISTAKES = 3
_CASE, _HUNT = "case ", 11
"""How the name of a case of the bug hunt begins, and the notebook that has them."""
_MARKS = {"done": "●", "tried": "◐", "open": "·"}
_STYLE = """\
:root{color-scheme:light dark;font:15px/1.5 system-ui,sans-serif}
body{margin:2em auto;max-width:64em;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}
td,th{padding:.15em .6em;text-align:center;border-bottom:1px solid #8884}
th:first-child{text-align:left}
.bar{text-align:left}
.done{background:#2e9e5b44}.tried{background:#d9a40444}
i{display:inline-block;height:.8em;background:#4a7fd4;border-radius:2px;margin-right:.5em}
"""


@dataclass(slots=True)
class Board:
    """What a class has done so far."""

    attempts: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """By learner and exercise: how many checks looked at an answer."""
    passed: set[tuple[str, str]] = field(default_factory=set)
    """(learner, exercise) of what is done."""
    mistakes: dict[str, dict[str, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    """By exercise and sentence: who made the mistake."""
    guesses: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """By question (``1.a lines``) and learner: the last guess."""
    last: float = 0.0
    """When the last line was written, in seconds since the epoch; 0: there is none."""
    num_unreadable: int = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one line.

        Raises:
            KeyError, TypeError, ValueError: it is not a line of a journal.
        """
        learner, at = str(event["learner"]), float(event["time"])
        if "question" in event:
            for name, value in event["predicted"].items():
                self.guesses[f"{event['question']} {str(name).replace('_', ' ')}"][learner] = str(value)
        else:
            exercise = str(event["exercise"])
            self.attempts[learner][exercise] = int(event["attempt"])
            if event["passed"]:
                self.passed.add((learner, exercise))
            elif event["mistake"]:
                self.mistakes[exercise][str(event["mistake"])].add(learner)
        self.last = max(self.last, at)

    @property
    def exercises(self) -> list[str]:
        """The exercises that somebody has tried, in order; the cases of the bug hunt, ``case 4``, behind 11.4."""
        return sorted({number for tried in self.attempts.values() for number in tried}, key=_by_number)

    @property
    def summary(self) -> str:
        """The board in one line."""
        learners = {*self.attempts, *(learner for given in self.guesses.values() for learner in given)}
        if not learners:
            return "Nobody has checked anything yet."
        ago = max(0, round((time.time() - self.last) / 60))
        bad = f" {self.num_unreadable} lines are unreadable." if self.num_unreadable else ""
        cases = sum(number.startswith(_CASE) for number in self.exercises)
        tried = f"{len(self.exercises) - cases} exercises" + (f", {cases} case{'s' * (cases > 1)}" if cases else "")
        return f"{len(learners)} learners, {tried}; last entry {ago} min ago.{bad}"

    def state(self, learner: str, exercise: str) -> str:
        """``done``, ``tried`` or ``open``."""
        if (learner, exercise) in self.passed:
            return "done"
        return "tried" if exercise in self.attempts.get(learner, {}) else "open"

    def _common_mistakes(self) -> Iterable[tuple[str, list[tuple[str, int]]]]:
        for exercise in self.exercises:
            counted = [(sentence, len(who)) for sentence, who in self.mistakes.get(exercise, {}).items()]
            yield exercise, sorted(counted, key=lambda pair: (-pair[1], pair[0]))[:_NUM_MISTAKES]

    def _histograms(self) -> Iterable[tuple[str, list[tuple[str, int]]]]:
        for question in sorted(self.guesses, key=_by_number):
            yield question, sorted(Counter(self.guesses[question].values()).items(), key=lambda pair: _by_size(pair[0]))

    def _done(self, exercise: str) -> str:
        return f"done by {sum((who, exercise) in self.passed for who in self.attempts)} of {len(self.attempts)}"

    def __str__(self) -> str:
        exercises = self.exercises
        lines = [self.summary]
        if exercises:
            lines += ["", f"{'':<14}{''.join(f'{number:>{_width(number)}}' for number in exercises)}"]
        for learner in sorted(self.attempts):
            marks = (f"{_MARKS[self.state(learner, number)]:>{_width(number)}}" for number in exercises)
            lines.append(f"{learner:<14}{''.join(marks)}")
        for exercise, mistakes in self._common_mistakes():
            lines += ["", f"{exercise} {self._done(exercise)}", *(f"  {who} × {text}" for text, who in mistakes)]
        for question, counts in self._histograms():
            lines += ["", f"guess {question}", *(f"  {value:>8} {'█' * count} {count}" for value, count in counts)]
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return a page that reloads itself every ten seconds, for the wall."""
        exercises = self.exercises
        head = "".join(f"<th>{escape(number)}</th>" for number in exercises)
        rows = []
        for learner in sorted(self.attempts):
            cells = (
                f'<td class="{state}" title="{self.attempts[learner].get(number, 0)} checks">{_MARKS[state]}</td>'
                for number in exercises
                for state in [self.state(learner, number)]
            )
            rows.append(f"<tr><th>{escape(learner)}</th>{''.join(cells)}</tr>")
        parts = [f"<h1>{escape(self.summary)}</h1>"]
        parts += [f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"] if exercises else []
        for exercise, mistakes in self._common_mistakes():
            items = "".join(f"<li>{who} × {escape(text)}</li>" for text, who in mistakes)
            parts.append(f"<h2>{escape(exercise)} {self._done(exercise)}</h2><ul>{items}</ul>")
        for question, counts in self._histograms():
            bars = "".join(
                f'<tr><th>{escape(value)}</th><td class="bar"><i style="width:{16 * count}px"></i>{count}</td></tr>'
                for value, count in counts
            )
            parts.append(f"<h2>Guess {escape(question)}</h2><table>{bars}</table>")
        return (
            '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="10"><title>Class board</title>'
            f"<style>{_STYLE}</style><body>{''.join(parts)}"
        )


def read_board(folder: Path) -> Board:
    """Read what the learners of a class have written into the folder of `AXON_NB_CLASS_DIR`.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"axon-nb class: there is no folder {folder}. Create it where all learners can write, and set "
            f"AXON_NB_CLASS_DIR to it before their kernels start."
        )
    board = Board()
    for path in sorted(folder.glob("*.jsonl")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            board.num_unreadable += 1
            continue
        for line in text.splitlines():
            try:
                board.add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                board.num_unreadable += 1
    return board


def _width(number: str) -> int:
    return max(6, len(number) + 2)


def _by_number(text: str) -> list[tuple[bool, int, str]]:
    parts = (f"{_HUNT}.{text}" if text.startswith(_CASE) else text).replace(" ", ".").split(".")
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _by_size(text: str) -> tuple[bool, float, str]:
    try:
        return (False, float(text), text)
    except ValueError:
        return (True, 0.0, text)
