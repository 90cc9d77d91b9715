"""Models of Hugging Face as users shard them: the units, and the memory of real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from axon_nb.parallel.data.units import make_units
from axon_nb.plan.footprint.plan import MemoryPlan
from axon_nb.plan.hugging_face import HuggingFaceModel
from axon_nb.plan.process.worker import run_in_process
from tests.plan.footprint.hugging_face import FAMILIES, LAYERS, config_of, measured, request_of
from tests.plan.many import plans
from tests.support.ranks import RankWorld

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """The plans of all families, in one process."""
    requests = {
        f"{family}{' again' * again}": request_of(family, activation_checkpointing=again)
        for family in FAMILIES
        for again in (False, True)
    }
    found: dict[str, Any] = run_in_process(plans, cloudpickle.dumps(requests))
    return found


@pytest.fixture(scope="module")
def two() -> Iterator[RankWorld]:
    world = RankWorld(2, limit_s=300)
    with world:
        yield world


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_are_the_units(family: str) -> None:
    with torch.device("meta"):
        model = HuggingFaceModel(config_of(family))()
    assert [type(unit).__name__ for unit in make_units(model, None)] == [FAMILIES[family][2]] * LAYERS


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_is_that_of_real_ranks(family: str, again: bool, two: RankWorld, planned: dict[str, Any]) -> None:
    plan = planned[f"{family}{' again' * again}"]
    assert isinstance(plan, MemoryPlan), plan
    assert f"FSDP units: {LAYERS} {FAMILIES[family][2]}, and one of all other parameters" in str(plan)
    found = two.run(measured, family, again)[0]
    assert plan.worst.peak.total == pytest.approx(found["peak"], rel=0.02), plan.worst.peak
    assert plan.worst.persistent.total == pytest.approx(found["end"], rel=0.02), plan.worst.persistent
