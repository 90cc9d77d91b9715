"""Numbers and functions that a plan is asked with, looked at before anything is computed with them."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from axon_nb.plan.errors import PlanError

__all__ = ["check_callable", "check_watchers", "real_number", "whole_number"]


def whole_number(name: str, given: Any, *, least: int = 1, what: str = "") -> int:
    """A whole number, NumPy's included.

    Args:
        name: Of the argument.
        given: Its value.
        least: The smallest that has a meaning.
        what: Of what it is a number, such as ``ranks``.

    Raises:
        PlanError: it is none, or too small.
    """
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        raise PlanError(f"{name}={given!r}: it is a whole number{f' of {what}' if what else ''}, {least} or more.")
    return int(given)


def real_number(name: str, given: Any, *, rule: str, least: float = 0.0, most: float = float("inf")) -> float:
    """A number within limits.

    Args:
        name: Of the argument.
        given: Its value.
        rule: What it is, such as ``a share from 0 to 1``.
        least: The smallest that has a meaning.
        most: The largest.

    Raises:
        PlanError: it is none, or beyond these.
    """
    if isinstance(given, bool) or not isinstance(given, Real) or not least <= float(given) <= most:
        raise PlanError(f"{name}={given!r}: it is {rule}.")
    return float(given)


def check_callable(name: str, given: Any, what: str) -> None:
    """See that an argument is a function, or is left away.

    Args:
        name: Of the argument.
        given: Its value.
        what: What the function takes and gives.

    Raises:
        PlanError: it is something else.
    """
    if given is not None and not callable(given):
        raise PlanError(f"{name}={given!r}: it is a function, {what}; or None.")


def check_watchers(progress: Any, cancel: Any) -> None:
    """See that what watches a simulation can be told of it, and can end it.

    Raises:
        PlanError: `progress` cannot be called, or `cancel` is nothing that can be set.
    """
    check_callable("progress", progress, "called with the share done and what is done next")
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise PlanError(f"cancel={cancel!r}: it is a threading.Event, which ends the plan when it is set; or None.")
