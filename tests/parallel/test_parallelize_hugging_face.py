"""The tensor-parallel plans of Hugging Face's models give the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axon_nb.comm import World
from axon_nb.parallel import parallelize
from axon_nb.parallel.tensor.parallelize import automatic_plan
from axon_nb.plan.models import HuggingFaceModel, next_token_loss
from tests.support.ranks import RankWorld
from tests.support.training.hugging_face import FAMILIES, config_of

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    tokens = torch.randint(1, 512, (2, 32))
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            found[name] = whole.clone()
    return float(loss), found


def _compared(world: World, families: list[str]) -> dict[str, tuple[bool, float, int, int]]:
    found = {}
    for family in families:
        torch.manual_seed(0)
        model: Any = HuggingFaceModel(config_of(family))()
        loss, whole = _gradients(model)
        model.zero_grad()
        size = sum(parameter.numel() for parameter in model.parameters())
        parallelize(model, "auto", mesh=world)
        again, sharded = _gradients(model)
        assert whole.keys() == sharded.keys()
        worst = max(float((sharded[name] - own).abs().max() / own.abs().max()) for name, own in whole.items())
        held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())
        found[family] = abs(loss - again) < 1e-5, worst, held, size
    return found


def test_gradients_and_shares() -> None:
    with RankWorld(2, limit_s=500) as two:
        for found in two.run(_compared, list(FAMILIES)):
            for family, (same, worst, held, size) in found.items():
                assert same, family
                assert worst < 1e-4, family
                assert held < size, family
            for dense in ("Llama 3 8B", "Llama 3 70B", "Qwen 3", "Mistral", "Phi 3"):
                _, _, held, size = found[dense]
                assert held < 0.6 * size, f"{dense}: all but the embedding and the norms is sharded"


def test_indivisible_layers_stay_whole() -> None:
    with torch.device("meta"):
        grouped = HuggingFaceModel(config_of("Qwen 3", num_key_value_heads=2))()
        tied = HuggingFaceModel(config_of("Llama 3 8B", tie_word_embeddings=True))()
        sinks = HuggingFaceModel(config_of("GPT-OSS"))()
    styles, reasons = automatic_plan(grouped, num_ranks=4, sequence=False, parallel_loss=False)
    assert "model.layers.0.mlp.up_proj" in styles
    reason = reasons["model.layers.0.self_attn.k_proj"]
    assert "the number of heads must be divisible by the group size (4); got 2" in reason
    assert not any("self_attn" in name for name in styles)
    assert "lm_head" not in automatic_plan(tied, num_ranks=2, sequence=False, parallel_loss=False)[0]
    assert list(automatic_plan(sinks, num_ranks=2, sequence=False, parallel_loss=False)[0]) == ["lm_head"]
