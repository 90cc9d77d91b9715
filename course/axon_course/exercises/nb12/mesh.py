"""Exercise 12.1: which ranks form a group on an axis of a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial
from axon_nb.parallel.three_d import axis_group, make_mesh

Sizes = dict[str, int]

_ONE = ({"dp": 2}, {"dp": 4})
_TWO = ({"pp": 2, "dp": 2}, {"dp": 2, "tp": 4})
_THREE = ({"pp": 2, "dp": 2, "tp": 2},)
_ODD = ({"pp": 3, "dp": 2}, {"pp": 2, "dp": 3, "tp": 4}, {"dp": 4, "tp": 1})


def _places(sizes: Sizes) -> list[tuple[int, ...]]:
    """The coordinates of each rank."""
    return list(itertools.product(*map(range, sizes.values())))


def _grouped(rank: int, sizes: Sizes, axis: str, *, same: bool = False) -> list[int]:
    """The ranks that differ only on the axis; `same`: those that are alike there."""
    places, where = _places(sizes), list(sizes).index(axis)

    def key(place: tuple[int, ...]) -> Any:
        return place[where] if same else (*place[:where], *place[where + 1 :])

    return [other for other, place in enumerate(places) if key(place) == key(places[rank])]


def _call(trial: Trial, *args: Any) -> Any:
    return trial.run(lambda answer: answer(*args), ranks=1)[0]


def _holds(sizes_of_cases: tuple[Sizes, ...]) -> Callable[[Trial], str | None]:
    def test(trial: Trial) -> str | None:
        for sizes in sizes_of_cases:
            for axis in sizes:
                for rank in range(math.prod(sizes.values())):
                    got, right = _call(trial, rank, sizes, axis), _grouped(rank, sizes, axis)
                    if got != right:
                        shown = " × ".join(f"{name}={size}" for name, size in sizes.items())
                        return f"{shown}: rank {rank} on {axis} got {got!r}; right is {right}"
        return None

    return test


def _on_rank(answer: Any, sizes: Sizes) -> list[tuple[str, Any, list[int]]]:
    mesh = make_mesh(**sizes)  # type: ignore[arg-type]
    rank = mesh.get_rank()
    return [(axis, answer(rank, sizes, axis), sorted(axis_group(mesh, axis).ranks)) for axis in sizes]


def _as_the_library(trial: Trial) -> str | None:
    sizes = {"pp": 2, "dp": trial.ranks // 2} if trial.ranks < 8 else {"pp": 2, "dp": trial.ranks // 4, "tp": 2}
    for rank, groups in enumerate(trial.run(_on_rank, sizes)):
        for axis, got, right in groups:
            if got != right:
                return f"rank {rank} on {axis} got {got!r}; the mesh has {right}"
    return None


def _answers(trial: Trial, wrong: Callable[[int, Sizes, str], list[int]]) -> bool:
    sizes = _THREE[0]
    return all(_call(trial, rank, sizes, axis) == wrong(rank, sizes, axis) for rank in range(8) for axis in sizes)


def _first_axis_fastest(rank: int, sizes: Sizes, axis: str) -> list[int]:
    return _grouped(rank, dict(reversed(sizes.items())), axis)


def _neighbours(rank: int, sizes: Sizes, axis: str) -> list[int]:
    first = rank - rank % sizes[axis]
    return list(range(first, first + sizes[axis]))


MEMBERS = Exercise(
    id="12.1",
    title="Who is in a group",
    answer="members",
    properties=(
        Property("one axis: everybody", _holds(_ONE), mock_only=True),
        Property("two axes", _holds(_TWO), mock_only=True),
        Property("three axes", _holds(_THREE), mock_only=True),
        Property("sizes that differ", _holds(_ODD), mock_only=True),
        Property("as a real mesh has them", _as_the_library),
    ),
    mistakes=(
        Mistake(
            "These are the ranks with the same place on the axis. A group has all places of it, and shares the others.",
            lambda trial: _answers(trial, lambda *case: _grouped(*case, same=True)),
        ),
        Mistake(
            "Here the first axis varies fastest. It is the last one: along it, ranks are neighbours.",
            lambda trial: _answers(trial, _first_axis_fastest),
        ),
        Mistake(
            "These ranks are neighbours, whichever axis it is. Only along the last axis do ranks count 0, 1, 2, ….",
            lambda trial: _answers(trial, _neighbours),
        ),
        Mistake(
            "The rank itself is missing: it is a member of each of its groups.",
            lambda trial: _answers(trial, lambda *case: [other for other in _grouped(*case) if other != case[0]]),
        ),
    ),
    hints=(
        "Write the eight ranks of 2 × 2 × 2 as binary numbers. Which digit belongs to which axis?",
        (
            "One step along an axis adds a fixed number to the rank: 1 along the last axis, the last axis's size along "
            "the one before it, and so on. Call it the stride."
        ),
        "The rank's place on the axis is `rank // stride % size`. Go back to place 0, then list `size` ranks.",
    ),
    ranks=8,
)
