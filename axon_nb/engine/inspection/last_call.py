"""With what a model was called last: shapes and dtypes, taken down by a hook that is there for one call.

Planners need them to run the model without data. The hook is torch's public one and is taken out again by the call
that it has seen; a copy of the model, made meanwhile, has none that does anything.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from axon_nb.engine.session import current

__all__ = ["record_next_call", "recorded_inputs"]

_seen: weakref.WeakKeyDictionary[nn.Module, list[Any] | None] = weakref.WeakKeyDictionary()
_looked: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
"""In which cell a model's hook was set last."""
_NEVER = -1
_PLAIN = (bool, int, float, str, type(None))


class _Look:
    """The hook; not copied along with its module."""

    def __init__(self) -> None:
        self.handle: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.handle.remove()
        _waiting.pop(module, None)
        try:
            _seen[module] = _described(module, args, kwargs)
        except Exception:  # whatever it was called with, the call goes on
            _seen[module] = None

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _no_look, ()


def _no_look() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    pass


_waiting: weakref.WeakKeyDictionary[nn.Module, _Look] = weakref.WeakKeyDictionary()
"""Hooks that have not been called yet."""


def record_next_call(module: nn.Module) -> None:
    """Take down the model's next call; set once a cell at most."""
    cell = current().cell
    if module in _waiting or _looked.get(module, _NEVER) == cell:
        return
    _looked[module] = cell
    _waiting[module] = look = _Look()
    look.handle = module.register_forward_pre_hook(look, with_kwargs=True)


def recorded_inputs(module: nn.Module) -> list[Any] | None:
    """Arguments of the last call that was seen: of a tensor ``{"shape": […], "dtype": …}``, or a plain value.

    None: no call was seen, or one that cannot be made again by position and without data.
    """
    return _seen.get(module)


def _described(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
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
