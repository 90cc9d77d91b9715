"""What `%memory` asks and answers: controls, bars, words, a device that is too small, and the saved page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest

from axon_nb.cluster.inspection.memory import MemorySnapshot
from axon_nb.records.memory import MemoryPrediction, MemorySetup, MemoryUse, WhatIfState
from axon_nb.widgets.memory.view import MemoryView, describe_setup, prediction_bars, what_if_content, what_if_lines

MIB = 2**20
AS_IS = MemorySetup(2, "full_shard", 2, optimizer="lion", batch=4)
HELD = {"parameters": 40 * MIB, "gradients": 40 * MIB, "optimizer": 80 * MIB}
PEAK = {**HELD, "activations": 100 * MIB, "unsharded": 20 * MIB, "communication": 10 * MIB}


def estimate(setup: MemorySetup = AS_IS, **more: Any) -> MemoryPrediction:
    """Of two ranks, the second one with the highest peak."""
    fields: dict[str, Any] = {
        "persistent": {0: HELD, 1: HELD},
        "peak": {0: HELD, 1: PEAK},
        "when": "in backward of head",
        "notes": ("<so>",),
    }
    return MemoryPrediction(setup, "simulated", 1, **{**fields, **more})


def test_controls_show_current_and_requested_values() -> None:
    asked = MemorySetup(8, "hybrid_shard", 2, optimizer="sgd", batch=4)
    content = what_if_content(WhatIfState(AS_IS, True, asked), None)
    fields = {field["name"]: field for field in content["fields"]}
    assert [fields[name]["current"] for name in ("world_size", "strategy", "batch")] == [2, "full_shard", 4]
    assert [fields[name]["value"] for name in ("world_size", "strategy", "batch")] == [8, "hybrid_shard", 4]
    assert ["lion", "lion"] in fields["optimizer"]["choices"], "also what is not among the usual ones"
    assert ["shard_grad_op", "shard_grad_op (torch's ZeRO-2)"] in fields["strategy"]["choices"]
    assert ["gradient_state", "gradient_state (ZeRO-2)"] in fields["strategy"]["choices"]
    assert ["", "unchanged"] in fields["dtype"]["choices"]
    assert "choices" not in fields["world_size"]
    assert not content["proposed"]
    assert what_if_content(WhatIfState(), None)["fields"] == []


def test_answer_is_shown_next_to_current_memory() -> None:
    asked = MemorySetup(4, "full_shard", 4)
    half = {role: size // 2 for role, size in HELD.items()}
    state = WhatIfState(AS_IS, True, asked, MemoryPrediction(asked, "simulated", 0, {0: half}, {0: half}), estimate())
    bars = {own.label: own.bar for own in prediction_bars(state, None)}
    assert list(bars) == [
        "current, after a step", "current, at the peak", "proposed, after a step", "proposed, at the peak"
    ]  # fmt: skip
    assert sum(part for _, part in bars["current, at the peak"].segments) == pytest.approx(290 / 300)
    assert sum(part for _, part in bars["proposed, after a step"].segments) == pytest.approx(80 / 300)
    assert bars["proposed, at the peak"].text.startswith("80.0 MiB (parameters 20.0 MiB")


def test_formula_estimate_is_labelled() -> None:
    states = MemoryPrediction(AS_IS, "model states only", 0, {0: HELD})
    content = what_if_content(WhatIfState(AS_IS, True, AS_IS, states, doing="simulating: a step", share=0.5), None)
    assert content["heading"] == "full_shard on 2 ranks, lion, batch 4: 160 MiB, model states only"
    assert [bar["label"] for bar in content["bars"]] == ["current, after a step"]
    assert (content["doing"], content["share"]) == ("simulating: a step", 0.5)


def test_fit_is_stated_and_drawn() -> None:
    state = WhatIfState(AS_IS, True, AS_IS, estimate())
    verdicts = {size: what_if_content(state, size * MIB)["verdict"] for size in (200, 300, 3000)}
    assert verdicts[200] == {
        "claim": "It does not fit.", "text": "290 MiB of 200 MiB: 90.0 MiB too much.", "state": "error"
    }  # fmt: skip
    assert verdicts[300] == {
        "claim": "It fits, but barely.", "text": "290 MiB of 300 MiB, 10.0 MiB left.", "state": "warn"
    }  # fmt: skip
    assert verdicts[3000]["state"] == "ok"
    assert what_if_content(state, None)["verdict"] is None
    assert prediction_bars(state, 300 * MIB)[1].bar.capacity == 1
    assert prediction_bars(state, 200 * MIB)[1].bar.capacity == pytest.approx(200 / 290)
    assert sum(part for _, part in prediction_bars(state, 3000 * MIB)[1].bar.segments) == pytest.approx(290 / 3000)
    far = prediction_bars(state, 30_000 * MIB)[1].bar
    assert far.capacity is None, "a capacity that far away is written, not drawn: the bars would vanish"
    assert sum(part for _, part in far.segments) == pytest.approx(290 / 300)
    assert what_if_content(WhatIfState(AS_IS, True, AS_IS, estimate(host=5 * MIB)), None)["notes"][0].startswith(
        "Another 5.00 MiB of host memory is used"
    )


def test_setups_in_words() -> None:
    full = MemorySetup(8, "hybrid_shard", 4, "float16", "bfloat16", "sgd", "params", 2, True)
    assert describe_setup(full) == (
        "hybrid_shard on 8 ranks, 4 per replica, sgd, batch 2, float16, computing in bfloat16, params offloaded, "
        "checkpointing"
    )


def test_simulation_replaces_the_formula() -> None:
    asked: list[Any] = []
    view = MemoryView("model", asked.append)
    view.show(MemorySnapshot({0: MemoryUse(0, 0, "storages", HELD)}, {0: MemoryUse(0, 0, "estimate", HELD)}, ()))
    view.refresh(unseen=True)
    assert view.content["rows"][0]["estimated"]["text"].startswith("estimate: 160 MiB (parameters")
    view._handle_custom_msg({"op": "what_if", "setup": {"world_size": "8"}}, [])
    view._handle_custom_msg({"op": "what_if", "setup": None}, [])
    assert asked == [{"world_size": "8"}, None]
    reference = MemoryPrediction(AS_IS, "simulated", 0, {0: HELD}, {0: PEAK})
    view.show_what_if(WhatIfState(AS_IS, True, AS_IS, reference, reference))
    view.refresh(unseen=True)
    row = view.content["rows"][0]
    assert "peak 290 MiB, simulated" in row["estimated"]["text"]
    assert row["estimated"]["peak"] == pytest.approx(290 / 300, abs=1e-4)
    assert row["measured"]["segments"][0][1] == pytest.approx(40 / 300, abs=1e-4)
    assert len(json.dumps(view.what_if)) < 20_000
    # A proposal does not estimate current memory.
    view.show_what_if(WhatIfState(AS_IS, False, AS_IS, reference, reference))
    view.refresh(unseen=True)
    assert "peak" not in view.content["rows"][0]["estimated"]
    bundle = view.to_bundle()
    assert "plan: full_shard on 2 ranks" in bundle["text/plain"]
    assert "<script" not in bundle["text/html"]
    assert bundle["text/html"].count("data:image/svg+xml;base64,") > 4
    HTMLParser().feed(bundle["text/html"])
    view.close()


def test_error_is_one_sentence_on_the_page() -> None:
    state = WhatIfState(AS_IS, True, None, error="strategy='<x>': it is one of ddp.")
    assert what_if_lines(state) == ["plan: strategy='<x>': it is one of ddp."]
    view = MemoryView("model", lambda asked: None)
    view.show_what_if(state)
    assert "&lt;x&gt;" in view.to_bundle()["text/html"]
    assert view.what_if["error"] == state.error
    view.close()


def test_questions_require_exactly_one_model() -> None:
    view = MemoryView("")
    assert view.what_if == {}
    view._handle_custom_msg({"op": "what_if", "setup": None}, [])
    view.close()
