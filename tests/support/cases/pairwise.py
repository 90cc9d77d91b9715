"""Crosses of parameters: enough cases for every pair of values in each run, all others in the soak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any], exists: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Return the full cross of `axes` for `parametrize`; a case is slow if others cover all pairs of its values.

    Args:
        axes: The values of each parameter.
        exists: Whether there is a case with these values.
    """
    cases = [place for place in product(*map(range, map(len, axes))) if exists(*_values(axes, place))]
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(missing & _pairs(case)))
        chosen.add(best)
        missing -= _pairs(best)
    return [pytest.param(*_values(axes, case), marks=[] if case in chosen else [pytest.mark.slow]) for case in cases]


def _values(axes: Sequence[Sequence[Any]], place: tuple[int, ...]) -> list[Any]:
    return [axis[index] for axis, index in zip(axes, place, strict=True)]


def _pairs(place: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Pairs of (axis, index)."""
    return set(combinations(enumerate(place), 2))
