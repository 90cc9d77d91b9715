"""Models of Hugging Face as users shard them: the units, and the memory of real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from axon_nb.comm import World
from axon_nb.parallel import FSDP, checkpoint_blocks
from axon_nb.parallel.data.units import make_units
from axon_nb.plan.footprint.plan import MemoryPlan
from axon_nb.plan.footprint.request import MemoryRequest
from axon_nb.plan.hugging_face import HuggingFaceModel, next_token_loss
from axon_nb.plan.process.worker import run_in_process
from tests.plan.footprint.allocator import allocated
from tests.plan.many import plans
from tests.support.ranks import RankWorld
from tests.support.training.hugging_face import FAMILIES, LAYERS, config_of

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BATCH, SEQ, RANKS = 2, 64, 2


def request_of(family: str, **more: Any) -> MemoryRequest:
    """The request of a plan."""
    options: dict[str, Any] = {"mesh": {"dp": RANKS}, "strategy": "full_shard", "ranks": (0,), **more}
    model = HuggingFaceModel(config_of(family))
    return MemoryRequest(model, batch=BATCH, seq=SEQ, device="cpu", optimizer="adam", **options)


def measured(world: World, family: str, again: bool) -> dict[str, Any]:
    """Train it on this rank, and measure a step."""

    def made() -> tuple[Callable[[], None], Callable[[], Any]]:
        torch.manual_seed(0)
        model: Any = HuggingFaceModel(config_of(family))()
        if again:
            kind = FAMILIES[family][2]
            checkpoint_blocks(model, lambda module: type(module).__name__ == kind)
        tokens = torch.randint(1, 512, (BATCH, SEQ))
        sharded = FSDP(model, world)
        optimizer = sharded.optimizer(torch.optim.Adam)

        def step() -> None:
            next_token_loss(sharded(tokens), tokens).backward()
            optimizer.step()

        return step, optimizer.zero_grad

    return allocated(made, warm_ups=1, steps=4)


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
    world = RankWorld(2, limit_s=300, backend="gloo")  # a sum over shared memory may end, and free its memory, earlier
    with world:
        yield world


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_are_the_units(family: str) -> None:
    with torch.device("meta"):
        model = HuggingFaceModel(config_of(family))()
    assert [type(unit).__name__ for unit in make_units(model, None)] == [FAMILIES[family][2]] * LAYERS


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peak_matches_real_ranks(family: str, again: bool, two: RankWorld, planned: dict[str, Any]) -> None:
    plan = planned[f"{family}{' again' * again}"]
    assert isinstance(plan, MemoryPlan), plan
    assert f"FSDP units: {LAYERS} {FAMILIES[family][2]}, and one of all other parameters" in str(plan)
    found = two.run(measured, family, again)[0]
    assert plan.worst.peak.total == pytest.approx(found["peak"], rel=0.02), plan.worst.peak
    assert plan.worst.persistent.total == pytest.approx(found["end"], rel=0.02), plan.worst.persistent
