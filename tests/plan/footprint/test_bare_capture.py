"""Bare captures, as `%memory` plans them: activation checkpointing and the user's hooks are left out, too."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from axon_nb.parallel import checkpoint_blocks
from axon_nb.parallel.models import GPT, Block, GPTConfig
from axon_nb.plan.errors import CaptureError
from axon_nb.plan.skeleton import capture, inner_model, is_recomputed, plain_class


def made(model: nn.Module, device: str = "meta") -> Any:
    """A model from the bare capture of another."""
    with torch.device(device):
        return pickle.loads(capture(model, bare=True).factory)()


def shapes(model: nn.Module) -> dict[str, Any]:
    """Of all parameters and buffers, with what else belongs to them."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: (type(own), tuple(own.shape), own.dtype, own.requires_grad) for name, own in tensors}


class Tied(nn.Module):
    """Two names of one parameter, a buffer, one that is not saved, and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.scale = 2.0
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, 4) to the same shape."""
        return self.scale * self.second(self.first(x))


def test_model_is_rebuilt_without_its_data() -> None:
    for model in (GPT(GPTConfig(blocks=2)), Tied(), nn.Sequential(nn.BatchNorm1d(3), nn.LSTM(3, 2))):
        again = made(model)
        assert type(again) is type(model)
        assert shapes(again) == shapes(model)
        assert list(again.state_dict()) == list(model.state_dict())
    tied = made(Tied())
    assert tied.first.weight is tied.second.weight
    assert all(own.device.type == "meta" for own in tied.parameters())
    assert made(Tied(), "cpu")(torch.ones(2, 4)).shape == (2, 4)


def test_bare_capture_is_small_for_any_model() -> None:
    small, large = (capture(nn.Linear(size, size), bare=True).factory for size in (4, 4000))
    assert len(large) < len(small) + 20 < 4000


def test_hooks_and_checkpointed_forwards_are_left_out() -> None:
    model = GPT(GPTConfig(blocks=2))
    model.register_forward_hook(lambda *_: None)
    assert checkpoint_blocks(model, Block) == 2
    assert [is_recomputed(own) for own in model.children()] == [False, True, True, False]
    again = made(model, "cpu")
    assert not again._forward_hooks
    assert not any(map(is_recomputed, again.modules()))
    assert again(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 256)
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert is_recomputed(wrapped[0])
    assert plain_class(wrapped[0]) is nn.Linear
    assert list(shapes(made(wrapped))) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_compiled_models_are_captured_uncompiled() -> None:
    model = nn.Linear(3, 3)
    compiled: Any = torch.compile(model, backend="eager")
    assert inner_model(compiled) is model


def test_uncapturable_model_is_reported_in_one_sentence() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CaptureError, match="The model has uninitialized lazy parameters: run it once"):
        capture(lazy, bare=True)
    model: Any = nn.Linear(2, 2)
    model.lines = (line for line in ())
    with pytest.raises(CaptureError, match="model, a Linear, cannot be captured") as caught:
        capture(model, bare=True)
    assert "\n" not in str(caught.value)
