"""Sizes of one table in one unit, so that they can be compared at a glance: of tiny models as well as of huge ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["SizeUnit", "unit_for"]


@dataclass(frozen=True, slots=True)
class SizeUnit:
    """A binary unit of sizes."""

    name: str
    """``bytes``, ``KiB``, ``MiB`` or ``GiB``."""
    bytes: int
    """How many it has."""

    def of(self, num_bytes: int) -> float:
        """A size in this unit."""
        return num_bytes / self.bytes

    def text(self, num_bytes: int, *, decimals: int = 3) -> str:
        """The same without its name: ``12.500``, ``1,024.000``; ``0``, and ``<0.001`` for less than can be shown.

        Args:
            num_bytes: The size.
            decimals: How many there are, but for whole bytes.
        """
        if self.bytes == 1 or not num_bytes:
            return f"{num_bytes:,}"
        shown = f"{self.of(num_bytes):,.{decimals}f}"
        return shown if float(shown.replace(",", "")) else f"<{10.0**-decimals:.{decimals}f}"


_UNITS = tuple(SizeUnit(name, 1024**power) for name, power in (("GiB", 3), ("MiB", 2), ("KiB", 1), ("bytes", 0)))


def unit_for(sizes: Iterable[int]) -> SizeUnit:
    """The unit in which the largest of some sizes is 1 or more; from 1 GiB on always GiB.

    Args:
        sizes: In bytes.
    """
    largest = max(sizes, default=0)
    return next((unit for unit in _UNITS if largest >= unit.bytes), _UNITS[-1])
