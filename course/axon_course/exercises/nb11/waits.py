"""Exercise 11.1: who is to blame when ranks wait."""

from __future__ import annotations

from typing import Any

from axon_course.comparisons import shown
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial

Waits = dict[int, list[int]]

_ONE_MISSING: Waits = {0: [2], 1: [2], 2: [], 3: [2]}
_CHAIN: Waits = {0: [1], 1: [2], 2: [3], 3: []}
_IDLE: Waits = {0: [], 1: [2], 2: [], 3: []}
_PAIR: Waits = {0: [], 1: [3], 2: [], 3: [1]}
_TAIL: Waits = {0: [1], 1: [2], 2: [3], 3: [2]}
_TWO_CULPRITS: Waits = {0: [1, 3], 1: [], 2: [1, 3], 3: []}
_NOBODY: Waits = {0: [], 1: [], 2: [], 3: []}


def _reached(waits: Waits, rank: int) -> set[int]:
    """The ranks that a rank waits for, directly and through others."""
    found: set[int] = set()
    new = set(waits[rank])
    while new:
        found |= new
        new = {further for other in new for further in waits[other]} - found
    return found


def _right(waits: Waits) -> list[int]:
    awaited = {other for others in waits.values() for other in others}
    return sorted(rank for rank in awaited if not waits[rank] or rank in _reached(waits, rank))


def _call(trial: Trial, waits: Waits) -> Any:
    return trial.run(lambda answer, copy: answer(copy), waits, ranks=1)[0]


def _blames(trial: Trial, *cases: Waits) -> str | None:
    for waits in cases:
        found, right = _call(trial, waits), _right(waits)
        if found != right:
            return f"{waits}: got {shown(found)}; right is {right}"
    return None


def _shuffled(trial: Trial) -> str | None:
    """Longer chains and rings of more ranks, in a random order."""
    for length in (5, 8):
        order = trial.random.sample(range(length), length)
        chain = {order[i]: [order[i + 1]] if i + 1 < length else [] for i in range(length)}
        ring = {**chain, order[-1]: [order[2]]}
        if sentence := _blames(trial, chain, ring):
            return sentence
    return None


def _returns(trial: Trial, wrong: Any) -> bool:
    cases = (_ONE_MISSING, _CHAIN, _IDLE, _PAIR, _TAIL, _TWO_CULPRITS, _NOBODY)
    return all(_call(trial, waits) == wrong(waits) for waits in cases)


def _awaited(waits: Waits) -> list[int]:
    return sorted({other for others in waits.values() for other in others})


def _not_waiting(waits: Waits) -> list[int]:
    return [rank for rank, others in waits.items() if not others]


BLAME = Exercise(
    id="11.1",
    title="Who is to blame?",
    answer="to_blame",
    properties=(
        Property("one is missing", lambda trial: _blames(trial, _ONE_MISSING, _TWO_CULPRITS), mock_only=True),
        Property("all is well", lambda trial: _blames(trial, _NOBODY), mock_only=True),
        Property("some work, and nobody needs them", lambda trial: _blames(trial, _IDLE), mock_only=True),
        Property("one waits for one that waits", lambda trial: _blames(trial, _CHAIN), mock_only=True),
        Property("two wait for each other", lambda trial: _blames(trial, _PAIR), mock_only=True),
        Property("others wait for such a pair", lambda trial: _blames(trial, _TAIL), mock_only=True),
        Property("more ranks, in any order", _shuffled, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "This blames every rank that somebody waits for; but one that waits itself may be innocent.",
            lambda trial: _returns(trial, _awaited),
        ),
        Mistake(
            "This blames whoever does not wait. A rank that works, and that nobody waits for, has done nothing wrong.",
            lambda trial: _returns(trial, _not_waiting),
        ),
        Mistake(
            "Ranks that wait for each other in a ring all wait, so nobody is left to blame. Then blame the ring.",
            lambda trial: _returns(
                trial, lambda waits: [rank for rank in _awaited(waits) if rank in _not_waiting(waits)]
            ),
        ),
        Mistake(
            "A rank that waits for a ring need not be part of it: does the way lead back to the rank itself?",
            lambda trial: _returns(
                trial,
                lambda waits: (
                    [rank for rank in _awaited(waits) if rank in _not_waiting(waits)]
                    or [rank for rank, others in waits.items() if others]
                ),
            ),
        ),
    ),
    hints=(
        "Begin at one waiting rank and follow: for whom does it wait, and that one? Where do you end?",
        "You end at a rank that does not wait, or you walk in a circle. Both are to blame, and nobody else.",
        (
            "For each rank collect all that it waits for, also through others. Blame those that somebody waits for, "
            "and that either wait for nobody or are in their own collection."
        ),
    ),
)
