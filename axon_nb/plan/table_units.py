"""One unit for all sizes in a table, for tiny and for huge models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["SizeUnit", "unit_for"]


@dataclass(frozen=True, slots=True)
class SizeUnit:
    """A binary unit of size."""

    name: str
    """``bytes``, ``KiB``, ``MiB`` or ``GiB``."""
    bytes: int
    """Bytes per unit."""

    def of(self, num_bytes: int) -> float:
        """Convert bytes to this unit."""
        return num_bytes / self.bytes

    def text(self, num_bytes: int, *, decimals: int = 3) -> str:
        """Format bytes in this unit without its name: ``12.500``, ``1,024.000``, ``0`` or ``<0.001``.

        Args:
            num_bytes: The size.
            decimals: Number of decimals; whole bytes have none.
        """
        if self.bytes == 1 or not num_bytes:
            return f"{num_bytes:,}"
        shown = f"{self.of(num_bytes):,.{decimals}f}"
        return shown if float(shown.replace(",", "")) else f"<{10.0**-decimals:.{decimals}f}"


_UNITS = tuple(SizeUnit(name, 1024**power) for name, power in (("GiB", 3), ("MiB", 2), ("KiB", 1), ("bytes", 0)))


def unit_for(sizes: Iterable[int]) -> SizeUnit:
    """Return the unit in which the largest size is 1 or more; never larger than GiB.

    Args:
        sizes: In bytes.
    """
    largest = max(sizes, default=0)
    return next((unit for unit in _UNITS if largest >= unit.bytes), _UNITS[-1])
