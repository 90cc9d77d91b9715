"""The tensors of a model by name, on their way into a checkpoint and back."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from axon_nb.parallel.checkpoint.shards import Shards

__all__ = ["model_state", "set_model_state"]


def model_state(model: nn.Module, shards: Shards) -> dict[str, Any]:
    """Parameters and buffers over the memory that the model has them in; parts are DTensors.

    Args:
        model: Without wrappers.
        shards: Its parameters.
    """
    return {name: shards.wrap(name, value) for name, value in get_model_state_dict(model).items()}


def set_model_state(model: nn.Module, shards: Shards, state: dict[str, Any]) -> None:
    """Give the model what `model_state` had, after it was read into, or some of it."""
    own = {
        name: value.to_local() if name in shards.parts and isinstance(value, DTensor) else value
        for name, value in state.items()
    }
    set_model_state_dict(model, own, options=StateDictOptions(strict=False))
