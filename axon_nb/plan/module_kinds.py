"""Selects modules of a model by class, by class name, or by a function."""

from __future__ import annotations

from typing import Any

from torch import nn

from axon_nb.parallel.activation_checkpoint import matches
from axon_nb.plan.errors import PlanError

__all__ = ["checked_module_filter", "module_filter"]


def module_filter(given: Any, name: str) -> Any:
    """Return what selects the modules, with a class name turned into a function.

    Raises:
        PlanError: it is none of these.
    """
    if isinstance(given, str):
        return lambda module: type(module).__name__ == given
    kinds = tuple(given) if isinstance(given, list) else given
    known = all(isinstance(kind, type) for kind in kinds) if isinstance(kinds, tuple) else isinstance(kinds, int | type)
    if kinds is None or known or callable(kinds):
        return kinds
    raise PlanError(f"{name} must be a class, its name, classes, or a function of a module; got {given!r}.")


def checked_module_filter(model: nn.Module, given: Any, name: str) -> Any:
    """Return the same, after checking that the model has modules of the named classes.

    Raises:
        PlanError: it has none, or the option is invalid.
    """
    kinds = module_filter(given, name)
    named = isinstance(given, str | type | tuple | list)  # a function may select none: then the model is one unit
    if not named or any(matches(module, kinds) for module in model.modules()):
        return kinds
    names = sorted({type(module).__name__ for module in model.modules()} - {type(model).__name__})
    raise PlanError(f"{name}={given!r} matches no module of {type(model).__name__}, which has {', '.join(names)}.")
