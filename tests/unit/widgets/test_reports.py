"""The reports of `watch_numbers` and `--compare`: advice with commands as code."""

from __future__ import annotations

import base64
import math
import re

from axon_nb.cluster.branches import Branch, Branches
from axon_nb.cluster.comparison import Finding, Verdict
from axon_nb.cluster.divergence import NumbersFinding, NumbersVerdict
from axon_nb.widgets.reports import branches_bundle, comparison_bundle, divergence_bundle

DIFFERS = NumbersFinding(
    "weight", "0.bias", where="line 4", optimizer=0, step=3, problem="differs", ranks=(1,), others=(0, 2), can_undo=True
)
WRONG = Finding("0", "Linear", "the output", "forward", 0, (1,), 0.1, 1e-6, "scaled", "Use `world_size`, not <2>.")


def test_commands_in_advice_are_code() -> None:
    for bundle, code in (
        (divergence_bundle(NumbersVerdict(DIFFERS, 4, (0, 1, 2), 4)), "%distributed undo"),
        (comparison_bundle(Verdict(WRONG, {}, (), ())), "world_size"),
    ):
        page = bundle["text/html"]
        assert f">{code}</code>" in page
        assert "`" not in page
        assert f"`{code}`" in bundle["text/plain"]
    assert "not &lt;2&gt;." in page


def test_curves_keep_the_scale_of_the_runs_that_stay_finite() -> None:
    def run(value: str, *losses: float) -> Branch:
        return Branch(value, "ok", curves={"loss": tuple(enumerate(losses))})

    good, poor = run("0.1", 10.0, 1.0, 0.1), run("0.01", 10.0, 8.0, 6.0)
    diverged = run("9", 10.0, 1e5, 1e30, math.nan)
    page = branches_bundle(Branches("lr", [good, poor, diverged], kept="0.1"))["text/html"]
    alone = branches_bundle(Branches("lr", [good, poor]))["text/html"]
    curves, drawn_alone = (re.findall(r'<img alt="([^"]*)" src="([^"]*)"', text) for text in (page, alone))
    assert curves[:2] == drawn_alone
    assert curves[2][0] == "loss from 10 to nan"
    drawn = base64.b64decode(curves[2][1].partition(",")[2]).decode()
    assert "<path" in drawn, "the arrow where it leaves"
    assert len(re.findall(r"[\d.]+,[\d.]+", drawn.partition("points=")[2].partition("fill")[0])) == 2, "it ends there"
    assert ">diverged<" in page
    assert '✓ 0.1</th><td style="' in page
    assert '<b style="font-weight:600">finished, kept</b>' in page
