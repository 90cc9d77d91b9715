"""Records the inputs of a model's last call: shapes and dtypes, captured by a hook that lasts for one call.

Planners need them to run the model without data. The hook uses torch's public API and removes itself after the call. A
copy of the model made meanwhile gets a hook that does nothing.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from axon_nb.engine.session import current

__all__ = ["UncopiedHook", "record_next_call", "recorded_inputs"]

_recorded: weakref.WeakKeyDictionary[nn.Module, list[Any] | None] = weakref.WeakKeyDictionary()
_cell_of_hook: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
"""The cell in which a model's hook was last installed."""
_NEVER = -1
_PLAIN = (bool, int, float, str, type(None))


class UncopiedHook:
    """A module hook that is not copied with its module: the copy gets a hook that does nothing."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _make_noop, ()


def _make_noop() -> Callable[..., None]:
    return _noop


def _noop(*_: Any) -> None:
    pass


class _InputRecorder(UncopiedHook):
    """Records the inputs of one call, then removes itself."""

    def __init__(self) -> None:
        self.handle: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.handle.remove()
        _pending.pop(module, None)
        try:
            _recorded[module] = _describe(module, args, kwargs)
        except Exception:  # recording must never break the user's call
            _recorded[module] = None


_pending: weakref.WeakKeyDictionary[nn.Module, _InputRecorder] = weakref.WeakKeyDictionary()
"""Hooks that have not fired yet."""


def record_next_call(module: nn.Module) -> None:
    """Record the inputs of the model's next call; installs at most one hook per cell."""
    cell = current().cell
    if module in _pending or _cell_of_hook.get(module, _NEVER) == cell:
        return
    _cell_of_hook[module] = cell
    _pending[module] = recorder = _InputRecorder()
    recorder.handle = module.register_forward_pre_hook(recorder, with_kwargs=True)


def recorded_inputs(module: nn.Module) -> list[Any] | None:
    """Arguments of the last recorded call: ``{"shape": […], "dtype": …}`` for a tensor, or a plain value.

    None if no call was recorded, or if it cannot be repeated with positional arguments and without data.
    """
    return _recorded.get(module)


def _describe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    if bound.kwargs:
        return None
    found: list[Any] = []
    for value in bound.args:
        if type(value) in (torch.Tensor, nn.Parameter):
            found.append({"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")})
        elif isinstance(value, _PLAIN):
            found.append(value)
        else:
            return None
    return found
