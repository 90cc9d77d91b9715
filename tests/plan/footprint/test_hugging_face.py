"""Models of Hugging Face as users shard them: the units, and the memory of real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch

from axon_nb.comm import World
from axon_nb.parallel import FSDP, Pipeline, checkpoint_blocks
from axon_nb.parallel.data.units import make_units
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest
from axon_nb.plan.footprint.training import all_stages
from axon_nb.plan.models import HuggingFaceModel, next_token_loss
from axon_nb.plan.process import run_in_process
from axon_nb.plan.tracing.subject import NamedStage
from tests.plan.footprint.allocator import allocated
from tests.plan.many import plans
from tests.support.ranks import RankWorld
from tests.support.training.hugging_face import FAMILIES, LAYERS, config_of

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BATCH, SEQ, RANKS = 2, 64, 2
PIPED = ("Llama 3 8B", "Gemma 3")


def request_of(family: str, **more: Any) -> MemoryRequest:
    """The request of a plan."""
    options: dict[str, Any] = {"mesh": {"dp": RANKS}, "strategy": "full_shard", "ranks": (0,), **more}
    model = HuggingFaceModel(config_of(family))
    return MemoryRequest(model, batch=BATCH, seq=SEQ, device="cpu", optimizer="adam", **options)


def untied(family: str) -> Any:
    """A config whose stages share no parameter."""
    config = config_of(family)
    config.tie_word_embeddings = False
    return config


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

    return allocated(made, warm_ups=1)


def piped(world: World, family: str) -> dict[str, Any]:
    """Train it as two stages, and measure a step."""

    def made() -> tuple[Callable[[], None], Callable[[], Any]]:
        torch.manual_seed(0)
        stages = all_stages(HuggingFaceModel(untied(family))(), 2)
        pipe = Pipeline.from_modules(stages, group=world, num_microbatches=2, spans=False)
        optimizer = torch.optim.Adam(pipe.parameters())
        tokens = torch.randint(1, 512, (BATCH, SEQ))

        def loss(logits: torch.Tensor, target: torch.Tensor) -> Any:
            return next_token_loss(NamedStage.as_output(logits), target)

        def step() -> None:
            pipe.step(tokens, tokens, loss)
            optimizer.step()

        return step, optimizer.zero_grad

    return allocated(made, warm_ups=1, steps=8)


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """The plans of all families, in one process."""
    requests = {
        f"{family}{' again' * again}": request_of(family, activation_checkpointing=again)
        for family in FAMILIES
        for again in (False, True)
    }
    for family in PIPED:
        options = {"mesh": {"pp": RANKS}, "num_microbatches": 2, "ranks": "all"}
        requests[f"{family} piped"] = replace(request_of(family, **options), model=HuggingFaceModel(untied(family)))
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


@pytest.mark.parametrize("family", PIPED)
def test_the_peak_of_a_stage_is_that_of_real_ranks(family: str, two: RankWorld, planned: dict[str, Any]) -> None:
    plan = planned[f"{family} piped"]
    assert isinstance(plan, MemoryPlan), plan
    for rank, found in zip(plan.ranks, two.run(piped, family), strict=True):
        assert rank.peak.total == pytest.approx(found["peak"], rel=0.04), (rank.rank, rank.peak)
