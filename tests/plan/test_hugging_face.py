"""Models of Hugging Face in plans: from a config, its file and its name, without weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from axon_nb import plan
from axon_nb.plan.footprint.training import all_stages
from axon_nb.plan.models import HuggingFaceModel, hugging_face_model
from axon_nb.plan.timing import compute_work
from axon_nb.plan.tracing.subject import ModelSource, pipeline_parts
from axon_nb.plan.tracing.trace import trace_model
from axon_nb.plan.traffic.communication import traffic_of
from axon_nb.plan.traffic.layout import ParallelLayout
from tests.support.training.hugging_face import FAMILIES, config_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(900)
BLOCK = "LlamaDecoderLayer"


def _config(**more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(
        **{**sizes, "num_hidden_layers": 8, "vocab_size": 64, "max_position_embeddings": 32} | more
    )


def test_config_and_its_file_give_the_same_plan(tmp_path: Path) -> None:
    config = _config()
    config.save_pretrained(tmp_path)
    plans = [plan.memory(given, 4, wrap=BLOCK, batch=2, seq=16) for given in (config, tmp_path / "config.json")]
    assert plans[0].ranks == plans[1].ranks
    made = plans[0]
    assert made.num_parameters == sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    assert "4 and 5 of 8 equal blocks" in made.method, "the index of a layer does not make it another one"
    whole = plan.memory(config, 4, wrap=BLOCK, batch=2, seq=16, extrapolate=False)
    assert whole.worst.peak == made.worst.peak


def test_gemmas_local_and_global_layers_are_groups() -> None:
    config = transformers.Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=9,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=64,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 3,
    )
    options: dict[str, Any] = {"wrap": "Gemma3DecoderLayer", "batch": 2, "seq": 32}
    short, whole = (plan.memory(config, 2, extrapolate=way, **options) for way in (True, False))
    assert short.worst.peak == whole.worst.peak


def test_other_planners_take_configs() -> None:
    found = plan.step_time(_config(num_hidden_layers=2), 4, seq=16, wrap=BLOCK, rates=1e12, links="nvlink4")
    assert found.total_s > 0
    assert found.communication.calls("dp", "reduce_scatter") == 2 + 1  # blocks, and what is outside of them


def test_search_shards_checkpoints_and_divides_decoder_layers() -> None:
    config = _config(num_hidden_layers=6, hidden_size=128, intermediate_size=352, vocab_size=256)
    options: dict[str, Any] = {"rates": 1e12, "links": "nvlink4", "seq": 32, "global_batch": 32}
    found = plan.search(config, 4, 80, **options)
    assert "FSDP units: 6 LlamaDecoderLayer, and one of all other parameters" in str(found)
    sharded = [one for one in found.candidates if (one.dp, one.strategy) == (4, "full_shard")]
    fsdp = {one.activation_checkpointing: one for one in sharded}
    assert fsdp[True].memory["activations"] < 0.5 * fsdp[False].memory["activations"]
    assert fsdp[True].step_s > fsdp[False].step_s
    whole = plan.search(config, 4, 80, wrap=lambda module: False, **options)
    one = next(c for c in whole.candidates if (c.dp, c.strategy) == (4, "full_shard"))
    assert one.memory["unsharded parameters"] > 2 * fsdp[False].memory["unsharded parameters"]
    assert "FSDP units: the whole model is one" in str(whole)
    divided = [c for c in found.candidates if c.tp == 2 and c.pp == 1 and c.fits]
    assert divided
    halves = [c for c in divided if c.strategy == "full_shard" and not c.activation_checkpointing]
    assert halves[0].memory["model states"] < 1.2 * fsdp[False].memory["model states"]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_what_the_whole_model_does(family: str) -> None:
    config = config_of(family)
    config.tie_word_embeddings = False
    model = HuggingFaceModel(config)().eval()
    value = tokens = torch.randint(1, 512, (2, 24))
    stages = all_stages(model, 3)
    for stage in stages:
        value = stage(value)
    torch.testing.assert_close(value, model(tokens).logits)
    held = [{id(parameter) for parameter in stage.parameters()} for stage in stages]
    assert sum(map(len, held)) == len(set().union(*held)) == len(list(model.parameters()))


@pytest.mark.parametrize("has_plan", [True, False], ids=["by its pp_plan", "by its blocks"])
def test_stages_of_a_pipeline_hold_the_decoder_layers(has_plan: bool) -> None:
    trace = trace_model(ModelSource(HuggingFaceModel(_config(num_hidden_layers=6)), batch=4, seq=16))
    if not has_plan:
        del trace.model._pp_plan  # its class lists the head
        assert trace.model._pp_plan.keys() == {"lm_head"}
    layers = [f"model.layers.{number}" for number in range(6)]
    assert pipeline_parts(trace.model) == ("model.embed_tokens", *layers, "model.norm", "lm_head")
    layout = ParallelLayout(ModelSource(None), {"pp": 2}, num_microbatches=2, known_trace=trace)
    assert layout.stages is not None
    first, second = layout.stages.children
    assert (*first, *second) == pipeline_parts(trace.model)
    assert first[:4] == ("model.embed_tokens", *layers[:3])
    for phase in ("forward", "backward"):
        halves = [compute_work(layout, rank)[phase] for rank in (0, 1)]
        assert sum(half.flops for half in halves) == pytest.approx(trace.total(phase).flops)
        assert sum(half.bytes for half in halves) == pytest.approx(trace.total(phase).bytes)
    held = [{parameter.name for parameter in own} for own in layout.parameters_by_pp_rank]
    assert not held[0] & held[1]
    assert held[0] | held[1] == {name for name, _ in trace.model.named_parameters()}
    (row,) = traffic_of(layout, None).select(operation="send", phase="forward", pp_rank=0)
    assert row.messages == ((2 * 16 * 32 * 4, 2),)


def test_search_offers_pipelines_unless_stages_share_parameters() -> None:
    options: dict[str, Any] = {"rates": 1e12, "links": "nvlink4", "seq": 16, "global_batch": 16}
    found = plan.search(_config(num_hidden_layers=6), 4, 80, **options)
    offered = [one for one in found.candidates if one.pp > 1 and one.tp == 1]
    assert {one.pp for one in offered} == {2, 4}
    assert all(one.fits and one.step_s for one in offered)
    assert "pipeline stages of LlamaForCausalLM are parts of model.embed_tokens, …, lm_head" in str(found)
    tied = plan.search(_config(num_hidden_layers=6, tie_word_embeddings=True), 4, 80, **options)
    (reason,) = {one.reason for one in tied.candidates if one.pp == 2 and one.tp == 1}
    assert reason.startswith("model.embed_tokens and lm_head share a parameter")


@pytest.mark.parametrize("again", [None, True], ids=["plain", "checkpointed"])
def test_search_estimate_is_near_the_simulation(again: Any) -> None:
    config = _config(num_hidden_layers=6, hidden_size=256, intermediate_size=704, vocab_size=512)
    found = plan.search(config, 2, 80, rates=1e12, links="nvlink4", seq=32, global_batch=32, strategies="full_shard")
    one = next(c for c in found.candidates if c.dp == 2 and c.activation_checkpointing is bool(again))
    real = plan.memory(config, seq=32, fragmentation=0.05, **one.layout(32))
    assert one.memory_bytes == pytest.approx(real.peak_bytes, rel=0.2)


def test_names_and_paths(tmp_path: Path) -> None:
    assert isinstance(hugging_face_model("meta-llama/Llama-3.1-70B"), HuggingFaceModel)
    for other in ("model", "trainer.model", 7, len):
        assert hugging_face_model(other) is other
    with pytest.raises(plan.PlanError, match=r"cannot be read .*give the path of its config\.json"):
        plan.memory(str(tmp_path / "missing.json"), 2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8}))
    with pytest.raises(plan.PlanError, match="at most the model's context, 8 tokens; got 9"):
        plan.memory(tmp_path / "config.json", 2, seq=9)


def test_model_name_without_a_network_fails_fast_with_fix(tmp_path: Path) -> None:
    """In a process of its own, where the hub is an address that refuses connections."""
    script = """
import time
import transformers
from axon_nb import plan
plan.step_time
start = time.monotonic()
try:
    plan.step_time("nobody/nothing", 1, rates="h100")
except plan.PlanError as error:
    print(error)
print(time.monotonic() - start)
"""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    made = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    text, seconds = made.stdout.splitlines()
    assert "'nobody/nothing' is not in the cache, and the hub cannot be reached (ConnectError" in text
    assert text.endswith("give the path of its config.json, or an AutoConfig.")
    assert float(seconds) < 20, "the client's own retries take 25 s"
    assert made.stderr == ""
