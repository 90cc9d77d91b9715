"""Memory plans against the allocators of real Gloo ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from axon_nb.plan.footprint.plan import MemoryPlan
from axon_nb.plan.process import run_in_process
from tests.plan.footprint.training import Case, measured
from tests.plan.many import plans
from tests.support.ranks import RankWorld

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
TWO, HYBRID = (("dp", 2),), (("replicate", 2), ("shard", 2))
SHARDED = {
    **{f"{s}-{dtype or 'float32'}": Case(TWO, s, dtype=dtype) for s in STRATEGIES for dtype in (None, "bfloat16")},
    **{f"{s}-mixed": Case(TWO, s, mixed="bfloat16") for s in STRATEGIES},
    "keep_whole": Case(TWO, "shard_grad_op", keep_whole=True),
    "keep_whole-mixed": Case(TWO, "shard_grad_op", mixed="bfloat16", keep_whole=True),
    "hybrid_shard": Case(HYBRID, "hybrid_shard"),
    "hybrid_shard-mixed": Case(HYBRID, "hybrid_shard", mixed="bfloat16"),
    "full_shard-4": Case((("dp", 4),)),
    "full_shard-SGD": Case(TWO, optimizer="SGD"),
    "full_shard-Muon": Case(TWO, optimizer="Muon"),
    "dp-tp": Case((("dp", 2), ("tp", 2))),
    "dp-tp-mixed": Case((("dp", 2), ("tp", 2)), "shard_grad_op", mixed="bfloat16"),
    "tp": Case((("tp", 2),)),
}
OTHERS = {
    "full_shard-again": Case(TWO, again=True),
    "shard_grad_op-again": Case(TWO, "shard_grad_op", again=True),
    "dp-tp-again": Case((("dp", 2), ("tp", 2)), again=True),
    "ddp": Case(TWO, "ddp"),
    "ddp-again": Case(TWO, "ddp", again=True),
    "ddp-autocast": Case(TWO, "ddp", mixed="bfloat16"),
    "optimizer_state": Case(TWO, "optimizer_state"),
    "optimizer_state-again": Case(TWO, "optimizer_state", again=True),
    "pp-1F1B": Case((("pp", 2),), num_microbatches=4),
    "pp-GPipe": Case((("pp", 4),), schedule="GPipe", num_microbatches=8),
    "pp-Interleaved1F1B": Case((("pp", 2),), schedule="Interleaved1F1B", num_microbatches=4),
    "pp-dp": Case((("pp", 2), ("dp", 2)), num_microbatches=4),
    "pp-dp-mixed": Case((("pp", 2), ("dp", 2)), "shard_grad_op", num_microbatches=2, mixed="bfloat16"),
    "pp-tp": Case((("pp", 2), ("tp", 2)), num_microbatches=4),
    "pp-dp-tp": Case((("pp", 2), ("dp", 2), ("tp", 2)), num_microbatches=4),
    "pp-dp-tp-mixed": Case((("pp", 2), ("dp", 2), ("tp", 2)), "shard_grad_op", num_microbatches=2, mixed="bfloat16"),
}
CASES = SHARDED | OTHERS
ALL_RANKS = {"full_shard-4", "optimizer_state", *(name for name in CASES if name.startswith("pp"))}
"""Cases in which all ranks are planned; in the others, only rank 0."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def planned(request: pytest.FixtureRequest) -> dict[str, MemoryPlan]:
    """The plans of the selected cases, with every block simulated."""
    wanted = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    requests = {
        name: case.request(ranks="all" if name in ALL_RANKS else (0,), extrapolate=False)
        for name, case in CASES.items()
        if name in wanted
    }
    found: dict[str, MemoryPlan] = run_in_process(plans, cloudpickle.dumps(requests))
    return found


@pytest.fixture(scope="module")
def trained() -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Measures a case on real ranks, once."""
    known: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        worlds: dict[int, RankWorld] = {}

        def real(name: str) -> list[dict[str, Any]]:
            if name not in known:
                size = CASES[name].world
                if size not in worlds:
                    worlds[size] = stack.enter_context(RankWorld(size, limit_s=300, backend="gloo"))
                known[name] = worlds[size].run(measured, CASES[name])
            return known[name]

        yield real


@pytest.mark.parametrize("name", CASES)
def test_peak_matches_a_real_step(name: str, trained: Any, planned: dict[str, Any]) -> None:
    plan, limit = planned[name], 0.02 if name in SHARDED else 0.04
    assert isinstance(plan, MemoryPlan), plan
    for rank in plan.ranks:
        found = trained(name)[rank.rank]
        assert rank.peak.total == pytest.approx(found["peak"], rel=limit), (rank.rank, rank.peak)
        assert rank.persistent.total == pytest.approx(found["end"], rel=limit), (rank.rank, rank.persistent)


@pytest.mark.parametrize("name", CASES)
def test_model_states_are_exact(name: str, trained: Any, planned: dict[str, Any]) -> None:
    plan = planned[name]
    assert isinstance(plan, MemoryPlan), plan
    for rank, formula in zip(plan.ranks, plan.model_states, strict=True):
        held = trained(name)[rank.rank]["between"]
        assert (formula.parameters, formula.gradients, formula.optimizer) == held
        assert (rank.persistent.parameters, rank.persistent.gradients, rank.persistent.optimizer) == held
