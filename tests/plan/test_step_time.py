"""Predicted steps: published work formulas, and parts that add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from axon_nb import plan
from axon_nb.errors import UsageError
from axon_nb.parallel import Muon
from axon_nb.parallel.models import GPT, GPTConfig
from axon_nb.plan.hardware import Rates
from axon_nb.plan.tracing.operations import OpCounter
from axon_nb.plan.tracing.subject import ModelSource, owner
from axon_nb.plan.tracing.trace import trace_model

CONFIG = GPTConfig(vocab=96, context=32, hidden=64, heads=4, blocks=3)
BATCH = 4


def flops_of(config: GPTConfig, batch: int) -> tuple[float, float]:
    """Of matrix products, forward and backward: 24 b s h^2 + 4 b s^2 h a block, 2 b s h V for the logits.

    Narayanan et al., 2021, appendix. Backward takes twice that; attention's recomputes the scores, 5 products for 2.
    """
    b, s, h, v = batch, config.context, config.hidden, config.vocab
    dense = config.blocks * 24 * b * s * h * h + 2 * b * s * h * v
    attention = config.blocks * 4 * b * s * s * h
    return dense + attention, 2 * dense + 2.5 * attention


def test_flops_match_the_paper() -> None:
    trace = trace_model(ModelSource(CONFIG, batch=BATCH))
    forward, backward = flops_of(CONFIG, BATCH)
    assert trace.total("forward").flops == forward
    assert trace.total("backward").flops == backward


def test_work_is_split_by_module() -> None:
    trace = trace_model(ModelSource(CONFIG, batch=BATCH), optimizer=torch.optim.AdamW)
    assert trace.blocks == {f"block{i}" for i in range(CONFIG.blocks)}
    for phase in ("forward", "backward"):
        found = dict.fromkeys(trace.parts, 0.0)
        for path, work in trace.work[phase].items():
            found[owner(path, trace.parts) or "head"] += work.flops
        blocks = {found[name] for name in trace.blocks}
        assert len(blocks) == 1
        assert blocks != {0.0}
        assert found["head"] > 0
        assert sum(found.values()) == trace.total(phase).flops
    assert trace.total("optimizer").ops > 0
    assert trace.total("optimizer").flops == 0
    parameters = dict(trace.model.named_parameters())
    assert set(trace.ready) == set(parameters)
    assert trace.ready[0].startswith("head.")
    assert trace.ready[-1].startswith("embedding.")


def test_trace_counts_flops_as_torch() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))

    x = torch.ones(2, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        make()(x).sum().backward()
    trace = trace_model(ModelSource(make, x))
    assert trace.total("forward").flops + trace.total("backward").flops == counter.get_total_flops()


def test_parts_on_one_rank_are_work_over_rates() -> None:
    rates = Rates(1e9, 1e10, 1e-6)
    found = plan.step_time(CONFIG, 1, batch=BATCH, rates=rates)
    trace = trace_model(ModelSource(CONFIG, batch=BATCH), optimizer=torch.optim.AdamW)
    for phase in ("forward", "backward", "optimizer"):
        assert found.parts[f"compute, {phase}"] == pytest.approx(rates.seconds(trace.total(phase), phase))
    assert found.total_s == pytest.approx(sum(found.parts.values()))
    assert found.exposed_s == 0
    assert found.flops == sum(flops_of(CONFIG, BATCH))
    plain = plan.step_time(CONFIG, 1, batch=BATCH, rates=1e9, optimizer=None)
    assert plain.total_s == pytest.approx(found.flops / 1e9)
    assert plain.flops_per_s == pytest.approx(1e9)


def test_overlap_hides_communication() -> None:
    link = plan.Link("x", 1e-5, 1e8)
    options: dict[str, Any] = {"batch": BATCH, "rates": 1e12, "links": link, "strategy": "ddp", "bucket_size_mb": 0.1}
    none, half, most = (plan.step_time(CONFIG, 4, overlap=share, **options) for share in (0.0, 0.5, 1.0))
    whole = none.communication.seconds()
    assert none.exposed_s == pytest.approx(whole)
    cover = sum(row.seconds for row in none.communication.rows if row.overlaps_with == "backward")
    hidden = min(cover, none.parts["compute, backward"])
    assert half.exposed_s == pytest.approx(whole - hidden / 2)
    assert most.exposed_s == pytest.approx(whole - hidden)
    assert any("50%" in text for text in half.assumptions)


def test_sharding_divides_the_optimizer_step_and_tp_the_blocks() -> None:
    link = plan.Link("x", 0.0, 1e15)
    rates = Rates(1e9, 1e9, 0.0)
    one = plan.step_time(CONFIG, 1, batch=BATCH, rates=rates)
    sharded = plan.step_time(CONFIG, 4, batch=BATCH, rates=rates, links=link)
    ddp = plan.step_time(CONFIG, 4, batch=BATCH, rates=rates, links=link, strategy="ddp")
    name = "compute, optimizer"
    assert sharded.parts[name] == pytest.approx(one.parts[name] / 4)
    assert ddp.parts[name] == pytest.approx(one.parts[name])
    cut = plan.step_time(CONFIG, mesh={"tp": 2}, batch=BATCH, rates=1e9, links=link, optimizer=None)
    assert cut.flops == pytest.approx(sum(flops_of(CONFIG, BATCH)) / 2)
    assert cut.total_s < one.total_s


def test_muon_works_as_its_real_step_does() -> None:
    model = GPT(CONFIG)
    matrices = [parameter for name, parameter in model.named_parameters() if "block" in name and parameter.ndim == 2]
    for parameter in matrices:
        parameter.grad = torch.ones_like(parameter)
    optimizer = Muon(matrices)
    optimizer.step()
    with OpCounter(model) as counted:
        counted.phase = "optimizer"
        optimizer.step()
    work = counted.by_phase["optimizer"][""]

    def seconds(ranks: int, optimizer: str, rates: Rates, strategy: str = "full_shard") -> float:
        options: Any = {"batch": BATCH, "strategy": strategy, "links": plan.Link("free", 0.0, 1e18)}
        return plan.step_time(CONFIG, ranks, optimizer=optimizer, rates=rates, **options).parts["compute, optimizer"]

    products, moved = Rates(1e9), Rates(1e30, bytes_per_s=1e9)
    assert seconds(1, "Muon", products) == pytest.approx(work.flops / 1e9)
    assert seconds(2, "Muon", products) == pytest.approx(work.flops / 2e9), "each rank has half of the matrices"
    assert seconds(2, "Muon", products, "ddp") == pytest.approx(work.flops / 1e9), "replicas have all"
    rest = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in matrices)
    of_rest = seconds(1, "AdamW", moved) * rest / sum(p.numel() for p in model.parameters())
    assert seconds(1, "Muon", moved) == pytest.approx(work.bytes / 1e9 + of_rest, rel=1e-3)


def test_pipeline_has_a_bubble() -> None:
    link = plan.Link("x", 0.0, 1e15)
    config = dataclasses.replace(CONFIG, blocks=4)
    found = plan.step_time(
        config, mesh={"pp": 2}, batch=8, rates=1e9, links=link, optimizer=None, num_microbatches=8, at=["block2"]
    )
    assert found.schedule is not None
    times = found.schedule.times
    assert found.total_s == pytest.approx(found.schedule.step_s)
    assert found.parts["bubble and messages"] > 0
    expected = plan.schedule("1F1B", 2, 8, times)
    assert found.schedule.step_s == pytest.approx(expected.step_s)
    slow = plan.step_time(
        config,
        mesh={"pp": 2},
        batch=8,
        rates=1e9,
        links=plan.Link("x", 1e-3, 1e15),
        optimizer=None,
        num_microbatches=8,
        at=["block2"],
    )
    assert slow.total_s > found.total_s


def test_messages_between_stages_take_time() -> None:
    """With sequence parallelism each rank along tp sends its part of the activations."""
    link = plan.Link("x", 0.0, 1e6)
    options: dict[str, Any] = {"mesh": {"pp": 2, "tp": 4}, "batch": 4, "num_microbatches": 2, "rates": 1e12}
    for sequence in (False, True):
        found = plan.step_time(CONFIG, links=link, sequence=sequence, **options)
        (row,) = found.communication.select(axis="pp", operation="send", phase="forward", pp_rank=0)
        ((size, _),) = row.messages
        assert size == 2 * CONFIG.context * CONFIG.hidden * 4 // (4 if sequence else 1)
        assert found.schedule is not None
        assert found.schedule.latency_s == found.schedule.backward_latency_s == (pytest.approx(size / 1e6),)


def test_step_time_has_an_interval_and_its_assumptions() -> None:
    slow = plan.step_time(CONFIG, 4, batch=BATCH, rates=Rates(1e15, 1e15, 0.0), links=plan.Link("x", 0.0, 1e6))
    assert slow.uncertainty is not None
    assert slow.uncertainty.low_s < slow.total_s < slow.uncertainty.high_s
    assert slow.uncertainty.depends_on[0] == "the bandwidth along dp"
    assert "it depends most on the bandwidth along dp" in str(slow)
    alone = plan.step_time(CONFIG, 1, batch=BATCH, rates=1e9, optimizer=None)
    assert alone.uncertainty is not None
    assert alone.uncertainty.depends_on == ("the rate of matrix products",)
    assert alone.uncertainty.low_s == pytest.approx(alone.total_s / 1.25)


def test_three_axes() -> None:
    found = plan.step_time(
        dataclasses.replace(CONFIG, blocks=4),
        mesh={"pp": 2, "dp": 4, "tp": 2},
        batch=8,
        num_microbatches=4,
        rates=1e12,
        links={"pp": "ib-ndr", "dp": "ib-ndr", "tp": "nvlink4"},
    )
    assert {"bubble and messages", "communication, within stages", "compute, optimizer"} <= found.parts.keys()
    assert "ib-ndr" in str(found.communication)


def test_frame_figure_and_texts() -> None:
    found = plan.step_time(CONFIG, 2, batch=BATCH, rates=Rates(1e9, 1e9, 1e-6), links="ethernet-10g")
    frame = found.to_frame()
    assert frame["ms"].sum() == pytest.approx(1e3 * found.total_s)
    assert frame["share"].sum() == pytest.approx(1)
    assert len(found.figure().data) == len(frame)
    assert "GFLOP/s" in str(found)
    assert all(text in str(found) for text in found.assumptions)
    assert "<table" in found._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": 0}, "rates must be FLOP/s"),
        ({"rates": "fast"}, "rates must be FLOP/s"),
        ({"overlap": 2.0}, "a fraction from 0"),
        ({"links": None}, "links= is required"),
        ({"optimizer": "adamant"}, "or one of adadelta"),
        ({"gradient_accumulation": 0}, "gradient_accumulation must be a whole number, 1 or more; got 0"),
        (
            {"gradient_accumulation": 2, "mesh": {"pp": 2}, "batch": 2},
            "accumulates gradients over its microbatches: give num_microbatches=",
        ),
    ],
)
def test_bad_options_get_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan.step_time(CONFIG, 2, **({"rates": 1e9, "links": "nvlink4"} | options))


def test_inputs_are_required() -> None:
    with pytest.raises(UsageError, match="inputs= is required"):
        plan.step_time(lambda: nn.Linear(2, 2), 1, rates=1e9)
