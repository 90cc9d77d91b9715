"""Get and set the tensors of a model by name."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from axon_nb.parallel.checkpoint.shards import Shards

__all__ = ["model_state", "set_model_state"]


def model_state(model: nn.Module, shards: Shards) -> dict[str, Any]:
    """Return parameters and buffers, sharing the model's memory; shards are DTensors.

    Args:
        model: The model without wrappers.
        shards: Its parameters.
    """
    return {name: shards.as_dtensor(name, value) for name, value in get_model_state_dict(model).items()}


def set_model_state(model: nn.Module, shards: Shards, state: dict[str, Any]) -> None:
    """Load a state as returned by `model_state`, or a part of it, into the model."""
    own = {
        name: value.to_local() if name in shards.sharded_names and isinstance(value, DTensor) else value
        for name, value in state.items()
    }
    set_model_state_dict(model, own, options=StateDictOptions(strict=False))
