"""A search over layouts: what fits comes first, the fastest at the top, and each rejected one says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axon_nb import plan
from axon_nb.errors import UsageError
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from axon_nb.plan.communication_layout import Layout
from axon_nb.plan.search_memory import estimated_memory
from axon_nb.plan.step_time_model import Given
from axon_nb.plan.step_time_trace import trace_model

CONFIG = GPTConfig(vocab=64, context=16, hidden=64, heads=4, blocks=4)
OPTIONS: dict[str, Any] = {"rates": 1e12, "links": "nvlink4", "batch": 16}
MIB = 1 / 1024


def test_what_fits_comes_first_and_the_fastest_at_the_top() -> None:
    found = plan.search(CONFIG, 8, 4 * MIB, **OPTIONS)
    fitting = [one for one in found.candidates if one.fits]
    rejected = [one for one in found.candidates if not one.fits]
    assert fitting
    assert rejected
    assert list(found.candidates) == fitting + rejected
    assert found.best == min(fitting, key=lambda one: one.rank_key)
    assert all(one.memory_bytes <= 4 * 2**20 for one in fitting)
    assert all(one.dp * one.tp * one.pp == 8 for one in found.candidates)
    over = [one for one in rejected if one.memory]
    assert all("needs" in one.reason and "model states" in one.reason for one in over)
    layouts = {(one.dp, one.tp, one.pp, one.strategy, one.microbatches, one.recompute) for one in found.candidates}
    assert len(layouts) == len(found.candidates)
    frame = found.to_frame()
    assert frame["fits"].sum() == len(fitting)
    assert frame["step_ms"].iloc[0] == pytest.approx(1e3 * found.best.step_s)
    assert len(found.figure().data) == 2
    assert f"{len(fitting)} of {len(found.candidates)} layouts fit" in str(found)
    assert "<table>" in found._repr_html_()


def test_nothing_fits_and_all_fits() -> None:
    assert plan.search(CONFIG, 2, MIB / 1024, **OPTIONS).best is None
    every = plan.search(CONFIG, 2, 80, **OPTIONS)
    assert all(one.fits for one in every.candidates)
    assert every.best is not None
    assert not every.best.recompute, "what fits without need not be computed again"


def test_another_estimate_takes_the_place() -> None:
    asked: list[Layout] = []

    def estimate(layout: Layout) -> dict[str, int]:
        asked.append(layout)
        return {"all": 2**40 if layout.size("tp") == 1 else 1}

    found = plan.search(CONFIG, 4, 80, estimate=estimate, **OPTIONS)
    assert len(asked) == len([one for one in found.candidates if one.memory])
    assert all(one.fits == (one.tp > 1) for one in found.candidates if one.memory)


def test_what_forward_keeps_is_what_torch_keeps() -> None:
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    tokens, model = torch.zeros(2, CONFIG.context, dtype=torch.int64), GPT(CONFIG)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = next_byte_loss(model(tokens), tokens)
    trace = trace_model(Given(lambda: GPT(CONFIG), tokens, tokens, next_byte_loss))
    assert sum(trace.saved.values()) == pytest.approx(sum(kept.values()), rel=0.02)
    loss.backward()
    blocks = {trace.saved[f"block{i}"] for i in range(CONFIG.blocks)}
    assert len(blocks) == 1


def test_states_are_those_of_the_formula_and_recomputing_saves() -> None:
    plain = Layout.of(CONFIG, 4, {"batch": 8})
    parts = estimated_memory(plain)
    elements = sum(p.numel() for p in GPT(CONFIG).parameters())
    assert parts["model states"] == 4 * elements * 4 // 4, "parameters, gradients and two states, a quarter each"
    again = estimated_memory(Layout.of(CONFIG, 4, {"batch": 8}, recompute=True))
    assert again["activations"] < parts["activations"]
    piped = Layout.of(CONFIG, None, {"mesh": {"pp": 2}, "batch": 8, "microbatches": 8, "strategy": "ddp"})
    assert estimated_memory(piped)["activations"] < parts["activations"]


def test_inputs_are_needed() -> None:
    with pytest.raises(UsageError, match="give inputs="):
        plan.search(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)), 1, 80, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gpus": 0}, "each is above 0"), ({"memory": 0}, "each is above 0"), ({"batch": 0}, "each is above 0")],
)
def test_bad_input_is_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan.search(CONFIG, **({"gpus": 4, "memory": 80} | OPTIONS | options))
