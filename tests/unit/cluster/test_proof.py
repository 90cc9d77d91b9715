"""What a proof says, and why some advice has none."""

from __future__ import annotations

import pytest

from axon_nb.cluster.proof import Proof, why_unprovable
from axon_nb.records.performance.advice import Advice, advise
from tests.support.records.steps import Part, Steps, compute, late_compute, reduce, slow_loader


def test_proof_has_a_mean_and_twice_its_standard_error() -> None:
    assert str(Proof(0.44, (0.40, 0.42, 0.41, 0.41))) == "said 44%, proven 41% ± 1"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((late_compute, compute, reduce), ""),
        ((slow_loader, compute, reduce), "all ranks do this at the same time"),
        ((slow_loader, compute), "they need steps that make the same collectives"),
    ],
)
def test_advice_without_a_proof_says_why(parts: tuple[Part, ...], reason: str) -> None:
    recording = Steps(*parts).recording()
    found = why_unprovable(recording, advise(recording)[0])
    assert reason in found
    assert bool(found) == bool(reason)


def test_schedules_have_no_part_that_gets_faster() -> None:
    why = why_unprovable(Steps(compute).recording(), Advice("bubble", "", "", 0.2))
    assert "bubble is about a schedule" in why
