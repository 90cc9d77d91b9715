"""The ten cases of the bug hunt: which fault each one is, by the learner's seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

from axon_nb.errors import UsageError

Kind = Literal["skipped", "swapped", "raised", "shape", "dtype", "killed", "endless", "slow", "stale", "leak"]
Place = Literal["forward", "all_reduce", "optimizer", "all_gather"]

LINES: dict[Place, int] = {"forward": 24, "all_reduce": 27, "optimizer": 29, "all_gather": 31}
"""Where the program of notebook 11 reaches each place: lines of its cell, the first being ``%%distributed``."""
CASES = range(1, 11)

_ENDS_AT_ONCE: tuple[Kind, ...] = ("skipped", "swapped", "raised", "shape", "dtype")
_IS_QUIET: tuple[Kind, ...] = ("slow", "stale", "leak")
_PLACES: dict[Kind, tuple[Place, ...]] = {
    "skipped": ("all_reduce", "all_gather"),
    "swapped": ("all_reduce", "all_gather"),
    "raised": ("all_reduce", "all_gather", "forward"),
    "shape": ("all_reduce",),
    "dtype": ("all_reduce",),
    "killed": ("all_reduce", "all_gather"),  # in its forward, nobody could know the line
    "endless": ("all_reduce", "all_gather", "forward"),
    "slow": ("forward",),
    "stale": ("optimizer",),
    "leak": ("forward",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What one rank does wrong.

    Raises:
        UsageError: there is no such kind, or it cannot be planted there.
    """

    kind: Kind
    rank: int
    step: int
    """The step in which it begins, from 0. Slow, stale and leaking ranks go on with it until the end."""
    place: Place

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"There is no fault {self.kind!r}; faults: {', '.join(get_args(Kind))}.")
        if self.place not in _PLACES[self.kind]:
            raise UsageError(f"{self.kind!r} can be planted at {', '.join(_PLACES[self.kind])}; got {self.place!r}.")


def draw(case: int, *, seed: int, ranks: int) -> Fault:
    """Return the fault of a case: the same for the same seed.

    Cases 1 to 5 end at once, with a report; in case 6 a rank dies; case 7 never ends; 8 to 10 look as if all were well.

    Args:
        case: From 1 to 10.
        seed: Of the learner.
        ranks: Number of ranks.

    Raises:
        UsageError: there is no such case.
    """
    if case not in CASES:
        raise UsageError(f"There is no case {case!r}; cases: {CASES[0]} to {CASES[-1]}.")
    order = random.Random(seed)
    kinds: list[Kind] = [
        *order.sample(_ENDS_AT_ONCE, len(_ENDS_AT_ONCE)),
        "killed",
        "endless",
        *order.sample(_IS_QUIET, len(_IS_QUIET)),
    ]
    kind = kinds[case - 1]
    own = random.Random(f"{seed} {case}")
    lowest = min(1, ranks - 1) if kind == "killed" else 0  # rank 0 lends its variables to the one that replaces it
    return Fault(kind, own.randrange(lowest, ranks), own.randrange(3, 8), own.choice(_PLACES[kind]))
