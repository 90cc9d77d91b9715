"""What a learner accuses a rank of, and the points for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from types import EllipsisType
from typing import get_args

from axon_course.faults.cases import CASES, LINES, Fault, Kind, draw
from axon_course.journal import Journal
from axon_course.views import Text
from axon_nb.errors import UsageError

_FULL, _WRONG, _CLUE = 10, 2, 3
"""Points of a case, and what a wrong answer and a clue cost."""
_CLUES: dict[Kind, str] = {
    "skipped": "Two lines are in the report. Which comes later in a step? That rank has left something out before it.",
    "swapped": "All ranks are in the same line, and yet not in the same call.",
    "raised": "The report names an error and its rank. The others only waited.",
    "shape": "The report says what each rank has brought. Count the numbers.",
    "dtype": "As many numbers on each rank. But of what kind, and so, of how many bytes?",
    "killed": "A process cannot report its own death. The report says who is gone, and where it was last seen.",
    "endless": "`%distributed stacks` works while ranks are busy. Who is not waiting for anybody?",
    "slow": "In `%timeline`, the slow rank is the one that does not wait: all others wait for it.",
    "stale": "`%distributed diff network` compares the weights. Which line should have made them equal?",
    "leak": "`%distributed status` shows the memory of each rank. In which line could it grow in each step?",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """An accusation: what of it is right, and the points."""

    case: int
    right: Mapping[str, bool | None]
    """By ``rank``, ``line`` and ``kind``; None: not said."""
    points: int
    """Of this case, once it is solved."""
    total: int
    """Of all solved cases."""
    num_solved: int

    @property
    def solved(self) -> bool:
        """Whether rank, line and kind are right."""
        return all(self.right.values())

    @property
    def _remark(self) -> str:
        if not self.solved and None in self.right.values():
            return "Type your answer in place of each `...`."
        if not self.solved:
            return f"Look again; clue({self.case}) helps, for {_CLUE} points."
        return f"{self.points} of {_FULL} points. Solved: {self.num_solved} of {len(CASES)}, {self.total} points."

    def __repr__(self) -> str:
        marks = {True: "✓", False: "✗", None: "·"}
        words = "   ".join(f"{marks[state]} {name}" for name, state in self.right.items())
        return f"case {self.case}   {words}\n{self._remark}"

    def _repr_html_(self) -> str:
        return f'<pre style="margin:4px 0;font-family:inherit;background:none">{escape(repr(self))}</pre>'


def answer(case: int, *, rank: int | EllipsisType, line: int | EllipsisType, kind: str | EllipsisType) -> Verdict:
    """Say what is wrong in a case of the bug hunt; `...` stands for what you do not know yet.

    A case gives ten points, less two for each wrong answer and three for a clue.

    Args:
        case: Its number.
        rank: The rank that is to blame.
        line: The line of the program's cell at which it goes wrong.
        kind: One of the ten words.

    Raises:
        UsageError: there is no such case or kind.
    """
    journal = Journal()
    return judge(journal, case, _fault(case, journal), rank=rank, line=line, kind=kind)


def judge(
    journal: Journal,
    case: int,
    truth: Fault,
    *,
    rank: int | EllipsisType,
    line: int | EllipsisType,
    kind: str | EllipsisType,
) -> Verdict:
    """Compare an answer with the truth, keep its points in the journal, and tell the class's board, if there is one.

    Raises:
        UsageError: there is no such kind.
    """
    if kind is not Ellipsis and kind not in get_args(Kind):
        raise UsageError(f"kind must be one of {', '.join(get_args(Kind))}; got {kind!r}.")
    said = {"rank": (rank, truth.rank), "line": (line, LINES[truth.place]), "kind": (kind, truth.kind)}
    right = {name: None if guess is Ellipsis else guess == real for name, (guess, real) in said.items()}
    entry = journal.entry(_name(case))
    if None not in right.values() and not entry.get("solved"):
        if all(right.values()):
            points = max(1, _FULL - _WRONG * entry.get("wrong", 0) - _CLUE * entry.get("clues", 0))
            journal.update(_name(case), {"solved": True, "points": points})
        else:
            journal.update(_name(case), {"wrong": entry.get("wrong", 0) + 1})
        wrong = ", ".join(name for name, state in right.items() if not state)
        journal.report_to_class(
            {
                "exercise": _name(case),
                "passed": not wrong,
                "attempt": entry.get("wrong", 0) + 1,
                "mistake": f"Not right: {wrong}." if wrong else "",
            }
        )
    points_by_case = [found for each in CASES if (found := journal.entry(_name(each)).get("points"))]
    points = journal.entry(_name(case)).get("points", 0)
    return Verdict(case, right, points, sum(points_by_case), len(points_by_case))


def clue(case: int) -> Text:
    """Say where to look in a case of the bug hunt; it costs three points, once.

    Raises:
        UsageError: there is no such case.
    """
    journal = Journal()
    truth = _fault(case, journal)
    journal.update(_name(case), {"clues": 1})
    return Text(_CLUES[truth.kind])


def _name(case: int) -> str:
    return f"case {case}"


def _fault(case: int, journal: Journal) -> Fault:
    from axon_nb.cluster.session.clusters import require

    return draw(case, seed=journal.seed, ranks=require("answer(…)").world_size)
