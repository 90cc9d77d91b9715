"""Which modules of a model an option means: by class, by the name of one, or by a function."""

from __future__ import annotations

from typing import Any

from torch import nn

from axon_nb.parallel.activation_checkpoint import matches
from axon_nb.plan.errors import PlanError

__all__ = ["kinds_in", "kinds_of"]


def kinds_of(given: Any, name: str) -> Any:
    """Which modules are meant, with classes by name turned into a function.

    Raises:
        PlanError: what is given is none of it.
    """
    if isinstance(given, str):
        return lambda module: type(module).__name__ == given
    kinds = tuple(given) if isinstance(given, list) else given
    known = all(isinstance(kind, type) for kind in kinds) if isinstance(kinds, tuple) else isinstance(kinds, int | type)
    if kinds is None or known or callable(kinds):
        return kinds
    raise PlanError(f"{name}={given!r}: a class, its name, classes, or a function that is asked about each module.")


def kinds_in(model: nn.Module, given: Any, name: str) -> Any:
    """The same, of a model that has modules of the classes that are named.

    Raises:
        PlanError: it has none, or what is given is none of it.
    """
    kinds = kinds_of(given, name)
    named = isinstance(given, str | type | tuple | list)  # a function may mean none, so that the model is one unit
    if not named or any(matches(module, kinds) for module in model.modules()):
        return kinds
    names = sorted({type(module).__name__ for module in model.modules()} - {type(model).__name__})
    raise PlanError(f"{name}={given!r}: {type(model).__name__} has none; its modules are {', '.join(names)}.")
