"""`model.to(dtype)` for models on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["patched_apply"]


@contextlib.contextmanager
def patched_apply() -> Iterator[None]:
    """Inside, `to`, `half` and the like replace a module's parameters.

    `nn.Module._apply` swaps fake tensors with their results, which fails because torch itself holds weak references to
    them ("Cannot swap t1 because it has weakref associated with it", torch 2.13).
    """
    before = nn.Module._apply
    made: dict[int, tuple[Any, Any]] = {}
    deep = 0

    def of(given: Any, call: Callable[[Any], Any]) -> Any:
        if given is None:
            return None
        if id(given) not in made:  # a tensor shared by modules stays shared
            with torch.no_grad():
                value = call(given)
            if isinstance(given, nn.Parameter) and value is not given:
                value = nn.Parameter(value, requires_grad=given.requires_grad)
            made[id(given)] = given, value
        return made[id(given)][1]

    def apply(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        nonlocal deep
        deep += 1
        try:
            for child in module.children() if recurse else ():
                child._apply(fn)
            for tensors in (module._parameters, module._buffers):
                for name, given in tensors.items():
                    tensors[name] = of(given, fn)
        finally:
            deep -= 1
            if not deep:
                made.clear()
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]
