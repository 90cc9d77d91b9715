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

from axon_nb.engine.session import RankSession

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


class CallRecorder:
    """Records how the models of a rank are called.

    Args:
        session: This rank.
    """

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._inputs: weakref.WeakKeyDictionary[nn.Module, list[Any] | None] = weakref.WeakKeyDictionary()
        self._cells: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
        """The cell in which a model's hook was last installed."""
        self._pending: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models whose hook has not fired yet."""

    def record_next(self, module: nn.Module) -> None:
        """Record the inputs of the model's next call; installs at most one hook per cell."""
        cell = self._session.cell
        if module in self._pending or self._cells.get(module, _NEVER) == cell:
            return
        self._cells[module] = cell
        self._pending.add(module)
        hook = _InputHook(self)
        hook.handle = module.register_forward_pre_hook(hook, with_kwargs=True)

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs of a call."""
        self._pending.discard(module)
        try:
            self._inputs[module] = _describe(module, args, kwargs)
        except Exception:  # recording must never break the user's call
            self._inputs[module] = None

    def inputs_of(self, module: nn.Module) -> list[Any] | None:
        """Return the arguments of the last recorded call: ``{"shape": […], "dtype": …}`` for a tensor, else the value.

        None if no call was recorded, or if it cannot be repeated with positional arguments and without data.
        """
        return self._inputs.get(module)


class _InputHook(UncopiedHook):
    """Records the inputs of one call, then removes itself."""

    def __init__(self, recorder: CallRecorder) -> None:
        self._recorder = recorder
        self.handle: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.handle.remove()
        self._recorder.note(module, args, kwargs)


def _describe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    if bound.kwargs:
        return None
    facts: list[Any] = []
    for value in bound.args:
        if type(value) in (torch.Tensor, nn.Parameter):
            facts.append({"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")})
        elif isinstance(value, _PLAIN):
            facts.append(value)
        else:
            return None
    return facts
