"""Checks of arguments, made before anything is computed."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from axon_nb.plan.errors import PlanError

__all__ = ["check_callable", "check_callbacks", "check_int", "check_number"]


def check_int(name: str, given: Any, *, least: int = 1, what: str = "") -> int:
    """Check that an argument is a whole number; NumPy's integers count.

    Args:
        name: The argument's name.
        given: Its value.
        least: The smallest value allowed.
        what: What it counts, such as ``ranks``.

    Raises:
        PlanError: it is not a whole number, or too small.
    """
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        counted = f" of {what}" if what else ""
        raise PlanError(f"{name} must be a whole number{counted}, {least} or more; got {given!r}.")
    return int(given)


def check_number(name: str, given: Any, *, rule: str, least: float = 0.0, most: float = float("inf")) -> float:
    """Check that an argument is a number within limits.

    Args:
        name: The argument's name.
        given: Its value.
        rule: What it must be, such as ``a fraction from 0 to 1``.
        least: The smallest value allowed.
        most: The largest value allowed.

    Raises:
        PlanError: it is not a number, or out of range.
    """
    if isinstance(given, bool) or not isinstance(given, Real) or not least <= float(given) <= most:
        raise PlanError(f"{name} must be {rule}; got {given!r}.")
    return float(given)


def check_callable(name: str, given: Any, what: str) -> None:
    """Check that an argument is callable or None.

    Args:
        name: The argument's name.
        given: Its value.
        what: What the function takes and returns.

    Raises:
        PlanError: it is something else.
    """
    if given is not None and not callable(given):
        raise PlanError(f"{name} must be a function {what}, or None; got {given!r}.")


def check_callbacks(progress: Any, cancel: Any) -> None:
    """Check the progress callback and the cancel event of a simulation.

    Raises:
        PlanError: `progress` is not callable, or `cancel` has no `is_set`.
    """
    check_callable("progress", progress, "of the fraction done and the next step")
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise PlanError(f"cancel must be a threading.Event (set it to cancel the plan), or None; got {cancel!r}.")
