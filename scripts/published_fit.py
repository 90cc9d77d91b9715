"""Write `axon_nb/plan/fitted.toml`: what cards and links achieve, fitted to one half of the published runs.

`--check` only says whether it is up to date.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np

from axon_nb.plan.hardware import Shares
from scripts.generated_page import ROOT, write_or_check
from scripts.published_steps import Run, family_of, is_fitted, load_runs, predicted_s

TARGET = ROOT / "axon_nb" / "plan" / "fitted.toml"
GENERAL = ("other", "compiled", "nvlink", "network")
START, CHANGE, STEPS = 0.7, 0.02, 12
LIMITS = {"other": math.inf}
"""Largest values; those that are not listed are fractions, up to 1. Caches can make other operations faster than the
memory is."""


def fit(runs: Sequence[Run]) -> Shares:
    """Return the shares whose predictions have the smallest squared errors, by the Gauss-Newton method.

    Errors are logarithms of predicted over published seconds. Each source counts equally.

    Args:
        runs: The runs to fit to.
    """
    cards = sorted({family_of(run) for run in runs})
    names = (*cards, *GENERAL)
    counts = Counter(run.source for run in runs)
    weights = np.array([1 / math.sqrt(counts[run.source]) for run in runs])
    limits = np.log([LIMITS.get(name, 1.0) for name in names])
    columns = np.array([[family_of(run) == card for card in cards] for run in runs])

    def errors(logs: np.ndarray) -> np.ndarray:
        shares = _shares(cards, logs)
        return np.array([math.log(predicted_s(run, shares) / run.step_s) for run in runs]) * weights

    logs = np.full(len(names), math.log(START))
    for _ in range(STEPS):
        now = errors(logs)
        # A run depends on its own card's share alone, so one evaluation serves all cards.
        ends = [np.arange(len(names)) < len(cards), *(np.array(names) == name for name in GENERAL)]
        slopes = [(errors(logs - CHANGE * end) - now) / -CHANGE for end in ends]
        jacobian = np.column_stack([columns * slopes[0][:, None], *slopes[1:]])
        change = _bounded(jacobian, now, limits - logs)
        logs = logs + change
        if np.abs(change).max() < 1e-3:
            break
    return _shares(cards, logs)


def _bounded(jacobian: np.ndarray, now: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Solve for the change that cancels the errors best, with those beyond their limits held there."""
    held = np.zeros(len(limits), dtype=bool)
    change = np.zeros(len(limits))
    while True:
        change[held] = limits[held]
        change[~held] = np.linalg.lstsq(jacobian[:, ~held], -now - jacobian[:, held] @ limits[held], rcond=None)[0]
        beyond = ~held & (change > limits)
        if not beyond.any():
            return np.clip(change, -0.5, 0.5)
        held |= beyond


def _shares(cards: Sequence[str], logs: np.ndarray) -> Shares:
    values = [float(value) for value in np.exp(logs)]
    return Shares(dict(zip(cards, values, strict=False)), *values[len(cards) :])


def render() -> str:
    """Return the file."""
    found = fit([run for run in load_runs() if is_fitted(run)])
    lines = ["# Written by `python -m scripts.published_fit` from docs/published/runs.csv; do not edit."]
    lines += [f"{name} = {getattr(found, name):.2f}" for name in GENERAL]
    lines += ["", "[achieved]", *(f"{card} = {share:.2f}" for card, share in found.achieved.items())]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the file."""
    return write_or_check(TARGET, render, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
