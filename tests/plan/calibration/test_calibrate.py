"""`plan.calibrate` on real ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb import plan
from axon_nb.errors import UsageError
from axon_nb.parallel import make_mesh
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from axon_nb.plan.calibration.benchmarks import AxisBenchmark
from axon_nb.plan.hardware import Rates, Work
from tests.support.ranks import RankWorld

pytestmark = pytest.mark.timeout(600)

CONFIG = GPTConfig(vocab=96, context=32, hidden=64, heads=4, blocks=3)


def test_calibration_factors_make_the_measured_model_exact() -> None:
    rates = Rates(1e9, 1e9, 1e-6)
    work = {"forward": (Work(1e6, 1e5, 10), 0.5), "backward": (Work(2e6, 1e5, 10), 0.25)}
    fitted = rates.fitted(work, "here")
    for phase, (done, seconds) in work.items():
        assert fitted.seconds(done, phase) == pytest.approx(seconds)
    assert fitted.seconds(Work(1e6), "optimizer") == rates.seconds(Work(1e6), "optimizer")


TINY = GPTConfig(vocab=8, context=4, hidden=8, heads=2, blocks=1)
SMALL: dict[str, Any] = {"sizes": (1 << 12, 1 << 16), "repeats": 1, "budget_s": 600.0}


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    """Two ranks, with time to import torch on a busy machine."""
    with RankWorld(2, limit_s=500) as ranks:
        yield ranks


def _adjusted(_: Any) -> Any:
    tokens, model = torch.zeros(2, 4, dtype=torch.int64), GPT(TINY)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    found = plan.calibrate(
        operations=("all_reduce", "send"),
        model=model,
        inputs=tokens,
        target=tokens,
        loss=next_byte_loss,
        optimizer=torch.optim.SGD,
        **SMALL,
    )
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return found


def _plain(_: Any) -> Any:
    return plan.calibrate(make_mesh(device="cpu", dp=2, tp=1), **SMALL)


def test_calibration_on_ranks(world: RankWorld) -> None:
    every = world.run(_adjusted), world.run(_plain)
    for one, other in every:
        assert one == other, "all ranks have the same answer"
    adjusted, plain = every[0][0], every[1][0]
    assert adjusted.links.keys() == {"all"}
    assert plain.links.keys() == {"dp"}
    assert {sample.operation for sample in adjusted.samples} == {"all_reduce", "send"}
    assert {sample.num_ranks for sample in plain.samples} == {2}
    assert all(sample.seconds > 0 for sample in (*plain.samples, *adjusted.samples))
    assert adjusted.rates.factors.keys() == {"forward", "backward", "optimizer"}
    assert adjusted.rates.wrappers.keys() == {"dtensor", "ddp", "full_shard"}
    assert plain.rates.wrappers.keys() == {"dtensor"}
    assert plain.rates.products.keys() == {"float32", "bfloat16"}
    assert plain.rates.products["float32"] == plain.rates.flops_per_s
    assert 0 <= plain.overlap <= 1
    assert "2 ranks, gloo, cpu, 1 thread" in str(plain)
    assert len(plain.checks) == 2, "two sizes of a collective cannot check each other"
    assert all(check.measured_s > 0 and check.predicted_s > 0 for check in plain.checks)
    assert "its 2 check runs were off by" in str(plain)
    frame = plain.to_frame()
    assert set(frame["axis"]) == {"dp"}
    assert len(plain.figure().data) == 2 * 5
    assert "<table" in plain._repr_mimebundle_()["text/html"]
    links = {"dp": plain.links["dp"], "tp": "nvlink4"}
    predicted = plan.step_time(CONFIG, mesh={"dp": 8, "tp": 2}, batch=2, rates=adjusted, links=links)
    assert predicted.total_s > 0
    assert any("us per parameter" in text for text in predicted.assumptions)
    assert plan.communication(CONFIG, 8, links=adjusted).seconds() > 0


def _count_rounds(_: Any) -> list[int]:
    bench = AxisBenchmark("all", dist.group.WORLD, torch.device("cpu"))
    counts = []
    for limit_s in (0.1, 3600.0):
        counts.append(0)
        for _ in bench.rounds(4, least=2, limit_s=limit_s):
            time.sleep(0.3 * dist.get_rank())
            counts[-1] += 1
    return counts


def test_slow_rank_ends_a_measurement_on_all_ranks(world: RankWorld) -> None:
    assert world.run(_count_rounds) == [[2, 4], [2, 4]]


def test_calibration_errors() -> None:
    with pytest.raises(UsageError, match="No process group to measure"):
        plan.calibrate()
    with pytest.raises(UsageError, match="one or more sizes"):
        plan.calibrate(sizes=())
    with pytest.raises(UsageError, match="operations must be one of all_reduce"):
        plan.calibrate(operations=("whisper",))
    with pytest.raises(UsageError, match="the name of a mesh"):
        plan.calibrate("not a name", cluster=object())
