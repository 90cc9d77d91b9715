"""The reports of `watch_numbers` and `--compare`: advice with commands as code."""

from __future__ import annotations

from axon_nb.cluster.comparison import Finding, Verdict
from axon_nb.cluster.divergence import NumbersFinding, NumbersVerdict
from axon_nb.widgets.reports import comparison_bundle, divergence_bundle

DIFFERS = NumbersFinding("differs", "weight", "0.bias", "", "", (1,), (0, 2), 0, 3, "line 4", can_undo=True)
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
