"""Published training runs against predictions: half of them is kept from the fit of what cards achieve."""

from __future__ import annotations

import statistics

import pytest

from axon_nb.plan.hardware.cards import CARDS
from scripts.plan_published import SOURCES, memory_rows
from scripts.published_steps import Run, fitted_shares, interval_s, is_fitted, load_runs, predicted_s

pytestmark = pytest.mark.timeout(600)
NEAR, SHARE, WORST = 0.20, 0.80, 1.5


def _off(run: Run) -> float:
    ratio = predicted_s(run) / run.step_s
    return max(ratio, 1 / ratio)


@pytest.mark.parametrize("fitted", [True, False], ids=["fitted", "kept aside"])
def test_published_steps(fitted: bool) -> None:
    """Within 20 % for four of five, and never off by more than 1.5."""
    runs = [run for run in load_runs() if is_fitted(run) is fitted]
    found = {run: _off(run) for run in runs}
    assert len(runs) > 20
    assert max(found.values()) <= WORST, max(found, key=lambda run: found[run])
    assert statistics.fmean(off <= 1 + NEAR or off <= 1 / (1 - NEAR) for off in found.values()) >= SHARE


def test_every_run_has_a_source_and_is_in_one_half() -> None:
    runs = load_runs()
    assert {run.source for run in runs} <= SOURCES.keys()
    assert {run.card for run in runs} <= CARDS.keys()
    halves = [{(run.source, run.model) for run in runs if is_fitted(run) is half} for half in (True, False)]
    assert not halves[0] & halves[1]
    assert abs(len(halves[0]) - len(halves[1])) <= 1


def test_cards_follow_from_the_fitted_half() -> None:
    factors = fitted_shares(run for run in load_runs() if is_fitted(run))
    assert factors.keys() == {"a100", "h100", "h100-fp8", "h100-500w", "h100-500w-fp8"}
    for card, factor in factors.items():
        assert factor == pytest.approx(1, abs=0.2), card


def test_most_published_steps_are_in_their_intervals() -> None:
    """Of those that nothing was fitted to."""
    kept = [run for run in load_runs() if not is_fitted(run)]
    inside = [low <= run.step_s <= high for run in kept for low, high in (interval_s(run),)]
    assert statistics.fmean(inside) >= SHARE


def test_published_memory() -> None:
    rows = memory_rows()
    assert len(rows) >= 6
    assert max(abs(row.error) for row in rows) <= 0.10


def test_cards_without_published_runs_say_so() -> None:
    assert {card.name for card in CARDS.values() if card.is_fitted} == {run.card for run in load_runs()}
    assert "assumed" in CARDS["b200"].rates.source
    assert "assumed" not in CARDS["h100"].rates.source
