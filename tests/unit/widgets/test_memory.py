"""What `%memory` draws, and what its form asks and answers."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace

from axon_nb.cluster.inspection.memory import MemorySnapshot
from axon_nb.records.memory import ROLES, MemoryPrediction, MemorySetup, MemoryUse, WhatIfState
from axon_nb.widgets.memory.rows import MemoryRows, figures, notice
from axon_nb.widgets.memory.view import (
    MemoryView,
    bar_svg,
    describe_setup,
    memory_bundle,
    prediction_bars,
    role_swatch,
    what_if_content,
    what_if_lines,
)
from tests.support.records.memory_replies import GIB, MIB, SIZES, answers, use

AS_IS = MemorySetup(2, "full_shard", 2, optimizer="lion", batch=4)
HELD = {"parameters": 40 * MIB, "gradients": 40 * MIB, "optimizer": 80 * MIB}
PEAK = {**HELD, "activations": 100 * MIB, "unsharded": 20 * MIB, "communication": 10 * MIB}


def rows_of(*reported: MemorySnapshot) -> MemoryRows:
    made = MemoryRows("model")
    for own in reported:
        made.update(own)
    return made


def test_bars_are_to_scale_and_estimates_beside_them() -> None:
    (row,) = rows_of(answers(use(), estimated={**SIZES, "optimizer": 160 * MIB})).rows()
    assert [role for role, _ in row.measured.segments] == ["parameters", "gradients", "optimizer", "other"]
    assert row.estimated is not None
    assert sum(part for _, part in row.estimated.segments) == pytest.approx(240 / 250)
    assert sum(part for _, part in row.measured.segments) == pytest.approx(170 / 250)
    assert row.measured.peak == pytest.approx(170 / 250)
    assert row.measured.labels == ("40.0", "40.0", "80.0", "")
    assert (row.total, row.remark) == ("170 MiB", "model 33 % below estimate")
    assert row.measured.text == (
        "170 MiB (parameters 40.0 MiB, gradients 40.0 MiB, optimizer 80.0 MiB, other 10.0 MiB), highest seen 170 MiB"
    )
    assert row.estimated.text == "estimate: 240 MiB (parameters 40.0 MiB, gradients 40.0 MiB, optimizer 160 MiB)"


def test_copies_do_not_count_against_an_estimate() -> None:
    (row,) = rows_of(answers(use(by_role={**SIZES, "copies": 500 * MIB}), estimated=SIZES)).rows()
    assert row.remark == "as estimated"


def test_peak_is_kept() -> None:
    made = rows_of(answers(use()), answers(use(by_role={"parameters": 17 * MIB})))
    (row,) = made.rows()
    assert row.measured.peak == pytest.approx(170 / 200)
    assert row.measured.segments == (("parameters", 17 / 200),)


def test_resident_memory_is_drawn_against_what_is_available() -> None:
    made = rows_of(answers(use(resident=333 * MIB, resident_peak=340 * MIB, capacity=round(20.3 * GIB))))
    (row,) = made.rows()
    assert row.process.segments == (("resident", pytest.approx(333 / 1024 / 20.3)),)
    assert row.process.segments[0][1] < 0.03, "333 MiB of 20.3 GiB do not fill the bar"
    assert row.process.capacity == 1
    assert "of 20.3 GiB available" in row.process.text
    assert made.columns[-1] == "process"
    assert row.cells[-1].share == row.process.segments[0][1]
    assert row.cells[-1].text == "333 MiB of 20.3 GiB"


def test_all_bars_share_an_axis_with_ticks() -> None:
    gpu = use(source="allocator", by_role={"parameters": 6 * GIB}, peak=7 * GIB, capacity=80 * GIB, occupied=7 * GIB)
    scale = rows_of(answers(gpu)).scale
    assert [tick.label for tick in scale.ticks] == ["0", "20", "40", "60", "80 GiB"]
    assert [tick.share for tick in scale.ticks] == [0, 0.25, 0.5, 0.75, 1]
    cpu = rows_of(answers(use())).scale
    assert cpu.end == 200 * MIB
    assert [tick.label for tick in cpu.ticks] == ["0", "50", "100", "150", "200 MiB"]


def test_numbers_are_aligned_and_outliers_highlighted() -> None:
    def gpu(rank: int, activations: int) -> MemoryUse:
        roles = {"parameters": 6 * GIB, "activations": activations * GIB, "buffers": 50 * MIB, "other": 90 * MIB}
        return use(rank, source="allocator", by_role=roles, peak=60 * GIB, capacity=80 * GIB, occupied=60 * GIB)

    made = rows_of(answers(gpu(0, 20), gpu(1, 20), gpu(2, 45)))
    titles = ["parameters", "gradients", "optimizer", "activations", "rest", "total", "process"]
    assert made.columns == titles
    assert [[cell.text for cell in row.cells[:6]] for row in made.rows()] == [
        ["6.00", "0", "0", activations, "0.137", total]
        for activations, total in (("20.0", "26.1"), ("20.0", "26.1"), ("45.0", "51.1"))
    ]
    assert [[title for title, cell in zip(titles, row.cells, strict=True) if cell.flagged] for row in made.rows()] == [
        [], [], ["activations"]
    ]  # fmt: skip
    assert made.rest == "buffers up to 50.0 MiB, all other tensors up to 90.0 MiB"


def test_small_parameters_have_a_column_and_large_leftovers_have_none() -> None:
    roles = {"parameters": MIB // 4, "optimizer": MIB // 2, "copies": 20 * MIB, "other": 80 * MIB}
    made = rows_of(answers(use(by_role=roles)))
    assert made.columns[:4] == ["parameters", "gradients", "optimizer", "rest"]
    (row,) = made.rows()
    assert [cell.text for cell in row.cells[:4]] == ["0.250", "0", "0.500", "100"]
    page = memory_bundle(made)["text/html"]
    assert "rest: copies for undo and protection up to 20.0 MiB, all other tensors up to 80.0 MiB" in page


def test_fullest_rank_is_named_with_its_largest_role() -> None:
    def gpu(rank: int, activations: int) -> MemoryUse:
        roles = {"parameters": 6 * GIB, "activations": activations * GIB}
        size = sum(roles.values())
        return use(rank, source="allocator", by_role=roles, peak=size, capacity=80 * GIB, occupied=size)

    made = rows_of(answers(gpu(0, 48), gpu(1, 49), gpu(2, 68)))
    assert notice(made) == ("Rank 2 is 92 % full.", "Its activations take 20.0 GiB more than on the leanest rank.")
    assert figures(made)[0] == {"name": "fullest rank", "value": "74.0 GiB", "remark": "of 80.0 GiB, rank 2"}
    assert notice(rows_of(answers(gpu(0, 48)))) is None


def test_rank_near_its_limit_is_flagged() -> None:
    made = rows_of(answers(use(0), use(1, capacity=510 * MIB)))
    assert [bool(row.flag) for row in made.rows()] == [False, True]
    assert made.notes()[0] == "Rank 1: 98 % of the available memory is in use; 10.0 MiB left."


def test_gpu_memory_comes_from_the_allocator_with_capacity() -> None:
    gpu = use(
        source="allocator",
        by_role={**SIZES, "activations": 840 * MIB},
        peak=1500 * MIB,
        capacity=2000 * MIB,
        occupied=1900 * MIB,
    )
    made = rows_of(answers(gpu))
    (row,) = made.rows()
    assert row.measured.peak == pytest.approx(0.75)
    assert row.measured.capacity == 1
    assert "peak 1.46 GiB, of 1.95 GiB" in row.measured.text
    assert row.flag.startswith("95 % of the device memory is in use")
    assert "CUDA's allocator" in made.heading
    assert not any("Activations of" in note for note in made.notes())


def test_text_names_the_source_and_unknowns() -> None:
    text = memory_bundle(rows_of(answers(use(0), use(1), notes=("No estimate: because.",))))["text/plain"]
    lines = text.splitlines()
    assert lines[0] == "model: memory of 2 ranks, 170 MiB on each; measured: storages of live tensors"
    assert lines[1].startswith("  rank 0: 170 MiB (parameters 40.0 MiB")
    assert any(line.startswith("Activations of ranks 0-1 are unknown") for line in lines)
    assert lines[-1] == "No estimate: because."


def test_page_needs_no_script_and_escapes_names() -> None:
    made = MemoryRows("<model>")
    made.update(answers(use(), estimated=SIZES, notes=("<note>",)))
    html = memory_bundle(made)["text/html"]
    assert "&lt;model&gt;" in html
    assert "&lt;note&gt;" in html
    assert "<script" not in html
    assert "<svg" not in html
    HTMLParser().feed(html)


def test_every_role_has_a_style() -> None:
    for role in (*ROLES, "resident"):
        assert ET.fromstring(role_swatch(role)).tag.endswith("svg")


def test_bar_has_its_marks() -> None:
    (row,) = rows_of(answers(use(capacity=GIB))).rows()
    svg = bar_svg(row.process, width=120, height=10)
    ET.fromstring(svg)
    assert "stroke-dasharray" in svg


def test_update_is_small_for_any_number_of_ranks() -> None:
    view = MemoryView("model")
    view.show(answers(*(use(rank) for rank in range(80)), estimated=SIZES))
    view.refresh(unseen=True)
    assert len(json.dumps(view.content)) < 50_000
    assert "16 more ranks are left out." in view.content["notes"]
    view.close()


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
    assert ["shard_grad_op", "shard_grad_op (ZeRO-2)"] in fields["strategy"]["choices"]
    assert ["", "unchanged"] in fields["dtype"]["choices"]
    assert "choices" not in fields["world_size"]
    assert not content["proposed"]
    assert what_if_content(WhatIfState(), None)["fields"] == []
    assert not {"ep", "cp", "pp", "tp"} & fields.keys()
    asked = replace(AS_IS, ep=2, cp=4)
    fields = {
        field["name"]: field
        for field in what_if_content(WhatIfState(AS_IS, True, asked, axes=("ep", "cp")), None)["fields"]
    }
    assert [fields[name]["value"] for name in ("ep", "cp")] == [2, 4]
    assert describe_setup(asked).startswith("full_shard on 2 ranks, 2 per copy of the experts, 4 per sequence, ")


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
