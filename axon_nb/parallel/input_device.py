"""Check that a model's inputs are where the model is, before torch fails somewhere inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from axon_nb.comm.errors import TensorError


def check_inputs(kind: str, device: Callable[[], torch.device], *inputs: Any) -> None:
    """Check that the tensors among a model's inputs are on its kind of device.

    Args:
        kind: The kind of device where the model computes, such as ``cuda``.
        device: Returns the device itself, for the message.
        *inputs: Arguments of the model; tensors are searched for in lists, tuples and dictionaries.

    Raises:
        TensorError: one is on another device.
    """
    if problem := describe_other_device("inputs", kind, device, *inputs):
        raise TensorError(f"The {problem}.")


def describe_other_device(name: str, kind: str, device: Callable[[], torch.device], *values: Any) -> str:
    """Return where the first tensor in `values` is that is not with the model, and the fix; empty if all are.

    Scalars are left out: torch combines them with tensors of any device. For the arguments see `check_inputs`.
    """
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.ndim and value.device.type != kind:
            return f"{name} are on {value.device}, the model is on {device()}: use `x.to(device)`"
    return ""
