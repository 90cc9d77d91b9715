"""The axis that bars of bytes share: from zero to the capacity, or to a round number, with ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis."""

    share: float
    """Of the axis, 0 to 1."""
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis in bytes that begins at zero."""

    end: int
    """Bytes at its end."""
    capacity: int | None
    """Bytes of the device; None: unknown."""

    @classmethod
    def of(cls, sizes: Iterable[int], capacity: int | None) -> Scale:
        """Return an axis that holds all sizes and the capacity."""
        highest = max(sizes, default=0) or 1
        if capacity is not None:
            return cls(max(highest, capacity), capacity)
        step = _round_step(highest)
        return cls(math.ceil(highest / step - 1e-9) * step, None)

    @property
    def unit(self) -> str:
        """Unit of the labels."""
        return _UNITS[_power(self.end)]

    def number(self, size: int) -> str:
        """Return a size in the axis's unit, without the unit, such as ``13.3``."""
        value = size / 1024 ** _power(self.end)
        return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"

    def share(self, size: int) -> float:
        """Return the place of a size on the axis, 0 to 1."""
        return size / self.end

    @property
    def ticks(self) -> list[Tick]:
        """Round numbers on the axis; the last one has the unit."""
        step = _round_step(self.end)
        sizes = [i * step for i in range(int(self.end / step + 1e-9) + 1)]
        labels = [self.number(size) for size in sizes]
        labels[-1] += f" {self.unit}"
        return [Tick(self.share(size), label) for size, label in zip(sizes, labels, strict=True)]


def _power(size: int) -> int:
    return min(len(_UNITS) - 1, int(math.log(max(1, size), 1024) + 1e-9))


def _round_step(size: int) -> int:
    unit = 1024 ** _power(size)
    rough = size / unit / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    digit = next(digit for digit in (1, 2, 5, 10) if rough / power <= digit * 1.0001)
    return max(1, round(digit * power * unit))
