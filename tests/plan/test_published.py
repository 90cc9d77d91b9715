"""Published training runs against predictions: half of them is kept from the fit of what cards achieve."""

from __future__ import annotations

import math
import re
import statistics
from functools import partial

import pytest

from axon_nb import plan
from axon_nb.plan.hardware import CARDS, FITTED
from scripts.generated_page import ROOT
from scripts.plan_published import SOURCES, main, memory_rows, summary
from scripts.published_fit import GENERAL, fit
from scripts.published_memory import NEAR as NEAR_MEMORY
from scripts.published_models import MODELS, loss_of, model_of
from scripts.published_steps import (
    arguments_of,
    error_of,
    family_of,
    is_fitted,
    is_near,
    load_runs,
    predicted,
    predicted_s,
)

pytestmark = pytest.mark.timeout(600)
SHARE, WORST = 0.85, 1.5


def test_held_out_published_steps_are_predicted() -> None:
    """Within a factor of 1.2 for 85 %, and never off by more than 1.5."""
    kept = [run for run in load_runs() if not (is_fitted(run) or run.has_new_axes)]
    assert len(kept) > 40
    assert abs(max(map(error_of, kept), key=abs)) <= math.log(WORST)
    assert statistics.fmean(map(is_near, kept)) >= SHARE


def test_steps_in_which_ranks_share_experts_or_a_sequence_are_predicted() -> None:
    """Half of them within a factor of 1.2, and as often too fast as too slow; nothing was fitted to them."""
    found = [run for run in load_runs() if run.has_new_axes]
    assert len(found) >= 12
    assert not any(map(is_fitted, found))
    assert {run.ep > 1 for run in found} == {run.cp > 1 for run in found} == {True, False}
    assert statistics.fmean(map(is_near, found)) >= 0.5
    assert abs(statistics.median(map(error_of, found))) <= math.log(1.1)


def test_readme_states_the_held_out_accuracy() -> None:
    (said,) = re.findall(r"\[([^]]*)\]\(docs/plan_published.md\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    kept = [run for run in load_runs() if not (is_fitted(run) or run.has_new_axes)]
    assert f"{statistics.fmean(map(is_near, kept)):.0%}" in said.replace(" %", "%")
    assert f"Of {len(kept)} published training steps" in summary(load_runs())


@pytest.mark.parametrize(
    "chosen", [("mosaic-h100", "MPT 1B"), ("korthikanti", "GPT 22B"), ("nemo", "Llama 2 13B")], ids=" ".join
)
def test_published_table_matches_step_time(chosen: tuple[str, str]) -> None:
    """The table's traces repeat one block; users' traces have all."""
    run = next(run for run in load_runs() if (run.source, run.model) == chosen)
    tokens = plan.TensorSpec((run.batch, run.seq), "int64")
    found = plan.step_time(
        partial(model_of, MODELS[run.model]), inputs=tokens, target=tokens, loss=loss_of, **arguments_of(run)
    )
    assert found.total_s == pytest.approx(predicted(run).total_s, rel=1e-3)
    assert predicted_s(run) == pytest.approx(predicted(run).total_s)


def test_published_runs_have_a_source_and_one_half() -> None:
    runs = load_runs()
    assert {run.source for run in runs} <= SOURCES.keys()
    assert {run.card for run in runs} <= CARDS.keys()
    assert all(run.assumed for run in runs if 0 < run.recompute < 1)
    old = [run for run in runs if not run.has_new_axes]
    halves = [{(run.source, run.model) for run in old if is_fitted(run) is half} for half in (True, False)]
    assert not halves[0] & halves[1]
    assert abs(len(halves[0]) - len(halves[1])) <= 1


def test_shares_come_from_the_fitted_half() -> None:
    half = [run for run in load_runs() if is_fitted(run)]
    found = fit(half)
    assert found.achieved.keys() == FITTED.achieved.keys() == {family_of(run) for run in half}
    pairs = [(name, getattr(FITTED, name), getattr(found, name)) for name in GENERAL]
    pairs += [(card, share, found.achieved[card]) for card, share in FITTED.achieved.items()]
    for name, written, value in pairs:
        assert abs(written - value) <= 0.006, name


def test_most_published_steps_are_in_their_intervals() -> None:
    """Of those that nothing was fitted to."""
    kept = [run for run in load_runs() if not (is_fitted(run) or run.has_new_axes)]
    inside = [found.low_s <= run.step_s <= found.high_s for run in kept if (found := predicted(run).uncertainty)]
    assert len(inside) == len(kept)
    assert statistics.fmean(inside) >= 0.8


def test_published_memory() -> None:
    """Peaks within 10 % for 80 %; model states exactly, as far as they were published."""
    rows = memory_rows()
    assert {row.source for row in rows} <= SOURCES.keys()
    peaks = [row for row in rows if row.source != "zero"]
    assert len(peaks) >= 9
    assert statistics.fmean(abs(row.error) <= NEAR_MEMORY for row in peaks) >= 0.8
    assert max(abs(row.error) for row in rows if row not in peaks) <= 0.005


def test_the_page_is_up_to_date() -> None:
    assert main(["--check"]) == 0, "run `python -m scripts.plan_published`"


def test_gpus_without_published_runs_are_marked() -> None:
    fitted = {card.name for card in CARDS.values() if not card.assumption}
    assert fitted == {family_of(run) for run in load_runs()}
    assert "assumed" in CARDS["b200"].rates.source
    assert "assumed" not in CARDS["h100"].rates.source
