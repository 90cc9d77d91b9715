"""One variable of this rank as named arrays, for a comparison in the notebook, which has no torch."""

from __future__ import annotations

import sys
from typing import Any

import torch

from axon_nb.engine.namespace import users_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharded import is_dtensor

__all__ = ["variable_parts"]

_MAX_BYTES = 1 << 28
_MAX_TEXT = 400


def variable_parts(name: str) -> dict[str, Any]:
    """What is compared of a variable.

    Returns:
        ``parts``: NumPy arrays by name (of a module its parameters and buffers), or ``text``, or ``refused``: why not.
    """
    variables = users_variables(current().kernel.shell)
    if name not in variables:
        return {"refused": "has no such variable"}
    value = variables[name]
    if isinstance(value, torch.Tensor):
        return _arrays({"": value})
    if isinstance(value, torch.nn.Module):
        return _arrays({**dict(value.named_parameters()), **dict(value.named_buffers())})
    numpy, pandas = sys.modules.get("numpy"), sys.modules.get("pandas")
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return {"parts": {"": value}}
    if pandas is not None and isinstance(value, pandas.DataFrame):
        return {"parts": {f"column {column}": value[column].to_numpy() for column in value.columns}}
    try:
        return {"text": repr(value)[:_MAX_TEXT]}
    except Exception as error:
        return {"refused": f"cannot be shown: {type(error).__name__}"}


def _arrays(tensors: dict[str, Any]) -> dict[str, Any]:
    split = [
        name for name, t in tensors.items() if is_dtensor(t) and not all(place.is_replicate() for place in t.placements)
    ]
    if split:
        return {"refused": "is split over ranks: each has a part of its own"}
    local = {name: (t.to_local() if is_dtensor(t) else t).detach().cpu() for name, t in tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in local.values())
    if size > _MAX_BYTES:
        return {"refused": f"has {size >> 20} MiB, and {_MAX_BYTES >> 20} MiB are compared at most; name a part of it"}
    # NumPy has no bfloat16 nor float8.
    plain = {name: t if t.dtype.itemsize > 2 or not t.is_floating_point() else t.float() for name, t in local.items()}
    return {"parts": {name: tensor.numpy() for name, tensor in plain.items()}}
