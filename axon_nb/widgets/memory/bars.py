"""Stacked bars of memory by role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axon_nb.records.memory import ROLES
from axon_nb.records.units import format_bytes
from axon_nb.widgets.memory.scale import Scale

_MIN_LABELLED = 0.055
"""Share of the axis that a segment needs for its label."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; lengths are shares of the scale, 0 to 1."""

    segments: tuple[tuple[str, float], ...]
    """(role, length), from left to right; without those of length 0."""
    peak: float | None
    capacity: float | None
    """None: unknown."""
    text: str
    labels: tuple[str, ...] = ()
    """What is written on the segments; empty where there is no room."""


def stacked_bar(by_role: Mapping[str, int], scale: Scale, peak: int | None, capacity: float | None, text: str) -> Bar:
    """Return the bytes of all roles as a bar on an axis; `peak` is in bytes."""
    parts = segments(by_role, scale.end)
    labels = tuple(scale.number(by_role[role]) if share >= _MIN_LABELLED else "" for role, share in parts)
    return Bar(parts, None if peak is None else scale.share(peak), capacity, text, labels)


def segments(by_role: Mapping[str, int], scale: int) -> tuple[tuple[str, float], ...]:
    """Return the bytes of each role as shares of a scale in bytes."""
    return tuple((role, by_role[role] / scale) for role in ROLES if by_role.get(role))


def describe_roles(by_role: Mapping[str, int]) -> str:
    """Return text such as ``3.00 MiB (parameters 1.00 MiB, optimizer 2.00 MiB)``."""
    parts = [f"{role} {format_bytes(by_role[role])}" for role in ROLES if by_role.get(role)]
    details = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    return f"{format_bytes(sum(by_role.values()))}{details}"
