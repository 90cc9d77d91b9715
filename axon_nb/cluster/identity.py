"""Recognising an object later without keeping it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["recogniser"]


def recogniser(value: Any) -> Callable[[Any], bool]:
    """A function that tells whether an object is this one, which it does not keep alive."""
    try:
        reference = weakref.ref(value)
    except TypeError:  # numbers, texts, lists: their address may be another object's when they are gone
        identity = id(value)
        return lambda other: id(other) == identity
    return lambda other: reference() is other
