"""The reference models learn, and can be split between any two blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from axon_nb.parallel.models import CNN, GPT, MLP, GPTConfig, next_byte_loss, standard_library, windows


def test_gpt_learns_the_standard_library() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(hidden=32, heads=2, blocks=2, context=32))
    text = standard_library(1 << 16)
    assert b"import" in bytes(text.tolist())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        inputs, targets = windows(text, batch=16, seq=32)
        loss = next_byte_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.5)
    assert min(losses[-5:]) < 3.5


def test_later_bytes_do_not_change_earlier_logits() -> None:
    torch.manual_seed(0)
    model = GPT()
    inputs, targets = windows(standard_library(4096), batch=2, seq=16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    changed = inputs.clone()
    changed[:, 8:] = 0
    assert torch.equal(model(inputs)[:, :8], model(changed)[:, :8])


def test_gpt_is_a_sequence_of_blocks() -> None:
    model = GPT(GPTConfig(blocks=3))
    assert [name for name, _ in model.named_children()] == ["embedding", "block0", "block1", "block2", "head"]
    inputs, _ = windows(standard_library(4096), batch=2, seq=16)
    first, second = nn.Sequential(*list(model)[:2]), nn.Sequential(*list(model)[2:])
    assert torch.equal(second(first(inputs)), model(inputs))


def test_image_models_learn() -> None:
    pictures = torch.rand(3, 1, 8, 8)
    assert CNN()(pictures).shape == (3, 10)
    assert MLP()(pictures.flatten(1)).shape == (3, 10)


def test_invalid_model_sizes_raise() -> None:
    with pytest.raises(ValueError, match=r"hidden must be divisible by heads \(4\); got 30"):
        GPT(GPTConfig(hidden=30))
    with pytest.raises(ValueError, match=r"num_bytes must be at most [0-9]+"):
        standard_library(1 << 40)
