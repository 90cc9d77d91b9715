"""Variables of the rank's namespace, for push and pull."""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch

from axon_nb.engine.session import current

__all__ = ["fetch", "last_value", "put"]


def put(variables: dict[str, Any]) -> None:
    """Set variables."""
    current().kernel.shell.user_ns.update(variables)


def fetch(expression: str) -> tuple[str, Any]:
    """The value of a name or expression; tensors come to the CPU, as the notebook may have no accelerator.

    Returns:
        ``("plain", value)``, or ``("pickled", bytes)`` for what the notebook may not be able to load.
    """
    value = _portable(eval(expression, current().kernel.shell.user_ns))
    return ("plain", value) if _plain(value) else ("pickled", cloudpickle.dumps(value))


def last_value(token: str) -> tuple[str, Any, str]:
    """The value of a cell's last expression as `fetch` gives it, and its text for where it cannot be loaded."""
    value = _portable(current().extras["runner"].take_value(token))
    if _plain(value):
        return "plain", value, ""
    try:
        return "pickled", cloudpickle.dumps(value), repr(value)
    except Exception:
        return "plain", repr(value), ""


def _plain(value: Any) -> bool:
    """Whether any Python with our dependencies loads it: numbers, texts, tensors, arrays, and containers of them."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return True
    if type(value) in (list, tuple, set):
        return all(map(_plain, value))
    if type(value) is dict:
        return all(_plain(key) and _plain(item) for key, item in value.items())
    return type(value) is torch.Tensor or type(value).__module__ == "numpy"


def _portable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict) and type(value) is dict:
        return {key: _portable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_portable(item) for item in value)
    return value
