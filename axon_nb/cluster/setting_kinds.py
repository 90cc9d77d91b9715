"""What the value of a setting can be: how it is written, which values fit, how it is shown."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from axon_nb.errors import UsageError
from axon_nb.records.units import exact_bytes

__all__ = ["Acts", "Kind", "Number", "Switch", "Value", "byte_count", "count", "seconds"]

Value = bool | int | float

_ON = ("on", "true", "1", "yes")
_OFF = ("off", "false", "0", "no")
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BINARY = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_SIZES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    **{name.lower(): size for name, size in _BINARY.items()},
}


class Acts(enum.Enum):
    """When a new value of a setting takes effect."""

    NOW = "at once"
    NEXT_CELL = "from the next cell"
    NEXT_START = "from the next start"


class Kind(Protocol):
    """The type of a setting's values."""

    @property
    def unit(self) -> str:
        """What the documentation calls the unit."""

    def read(self, name: str, given: object) -> Value:
        """The value that `given` stands for, text or a value.

        Raises:
            UsageError: it does not fit; one sentence that names the setting `name` and says what does.
        """

    def show(self, value: Any) -> str:
        """The value with its unit, in a form that `read` understands."""


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off."""

    unit: str = "on or off"

    def read(self, name: str, given: object) -> bool:
        """See `Kind`."""
        text = str(given).strip().lower()
        if text not in _ON + _OFF:
            raise UsageError(f"{name} must be on or off; got {given!r}.")
        return text in _ON

    def show(self, value: Any) -> str:
        """See `Kind`."""
        return "on" if value else "off"


@dataclass(frozen=True, slots=True)
class Number:
    """A number, with or without a unit."""

    unit: str
    """``seconds``, ``bytes``, or empty: a count."""
    expected: str
    """Completes the sentence "it must be …"."""
    least: float
    most: float
    """The highest value that the code behind the setting can take."""
    whole: bool = False
    units: Mapping[str, float] = field(default_factory=lambda: {"": 1})
    """What each unit that may follow the number multiplies it by; lower case."""

    def read(self, name: str, given: object) -> int | float:
        """See `Kind`."""
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", _text(given))
        factor = self.units.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise self._refusal(name, given)
        number = float(match[1]) * factor
        if number < self.least or (self.unit == "" and number % 1):
            raise self._refusal(name, given)
        if number > self.most:
            raise UsageError(f"{name} must be at most {self.show(self.most)}; got {given!r}.")
        return int(number) if self.whole else number

    def _refusal(self, name: str, given: object) -> UsageError:
        return UsageError(f"{name} must be {self.expected}; got {given!r}.")

    def show(self, value: Any) -> str:
        """See `Kind`."""
        if self.unit == "bytes":
            return exact_bytes(value)
        text = str(int(value)) if value == int(value) else repr(float(value))
        return f"{text} s" if self.unit == "seconds" else text


def _text(given: object) -> str:
    """The digits of a number; what is no number, or is not finite, stays what no number looks like."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return str(given)
    if math.isfinite(given) and given >= 0:
        return f"{given:.17f}".rstrip("0").rstrip(".") if isinstance(given, float) else str(given)
    return repr(given)


def seconds(least: float = 0.0) -> Number:
    """A duration of at least `least` seconds."""
    what = "a number of seconds" + (f" of at least {least:g}" if least else "")
    return Number("seconds", f"{what}, such as 300 or 5min", least, 1e9, units=_TIMES)


def byte_count(least: int) -> Number:
    """A number of bytes, at least `least`."""
    what = f"a number of bytes of at least {least}, such as 65536 or 4MiB"
    return Number("bytes", what, least, 1 << 40, whole=True, units=_SIZES)


def count(expected: str, most: int) -> Number:
    """A whole number from 0 to `most`; `expected` completes the sentence "it must be …"."""
    return Number("", expected, 0, most, whole=True)
