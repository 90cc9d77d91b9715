"""Variables of the rank's namespace, for push and pull."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from axon_nb.engine.session import current

__all__ = ["fetch", "last_value", "put"]


def put(variables: dict[str, Any]) -> None:
    """Set variables."""
    current().kernel.shell.user_ns.update(variables)


def fetch(expression: str) -> Any:
    """The value of a name or expression; tensors come to the CPU, as the notebook may have no accelerator."""
    return _portable(eval(expression, current().kernel.shell.user_ns))


def last_value(token: str) -> Any:
    """The value of a cell's last expression; its text where it does not pickle."""
    value = _portable(current().extras["runner"].take_value(token))
    try:
        pickle.dumps(value)
    except Exception:
        return repr(value)
    return value


def _portable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict) and type(value) is dict:
        return {key: _portable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_portable(item) for item in value)
    return value
