"""The kinds of settings: how a value is written, which values are valid, and how a value is shown."""

from __future__ import annotations

import enum
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from axon_nb.errors import UsageError
from axon_nb.records.units import exact_bytes

Value = bool | int | float | str

_ON = ("on", "true", "1", "yes")
_OFF = ("off", "false", "0", "no")
_TRACKERS = {
    "tensorboard": "tensorboard:FOLDER",
    "wandb": "wandb:PROJECT",
    "mlflow": "mlflow:URI",
    "trackio": "trackio:PROJECT",
}
_MAX_FREQUENCY = 1 << 30
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BINARY = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    **{name.lower(): size for name, size in _BINARY.items()},
}


class TakesEffect(enum.Enum):
    """When a new value of a setting takes effect."""

    NOW = "at once"
    NEXT_CELL = "from the next cell"
    NEXT_START = "from the next start"


class Kind(Protocol):
    """The type of a setting's values."""

    @property
    def unit(self) -> str:
        """Name of the unit in the documentation."""

    def read(self, name: str, value: object) -> Value:
        """Parse `value`, which is text or a value.

        Raises:
            UsageError: it is invalid; the message names the setting `name` and says what is valid.
        """

    def show(self, value: Any) -> str:
        """Format a value with its unit, such that `read` understands it."""


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off."""

    unit: str = "on or off"

    def read(self, name: str, value: object) -> bool:
        """See `Kind`."""
        text = str(value).strip().lower()
        if text not in _ON + _OFF:
            raise UsageError(f"{name} must be on or off; got {value!r}.")
        return text in _ON

    def show(self, value: Any) -> str:
        """See `Kind`."""
        return "on" if value else "off"


@dataclass(frozen=True, slots=True)
class Tracker:
    """An experiment tracker and where it writes, such as ``tensorboard:runs``; empty: none."""

    unit: str = "a tracker"

    def read(self, name: str, value: object) -> str:
        """See `Kind`."""
        text = str(value).strip()
        if text.lower() in ("", *_OFF):
            return ""
        kind, _, where = text.removeprefix("all:").partition(":")
        if kind not in _TRACKERS or not where:
            raise UsageError(f"{name} must be off, or one of {', '.join(_TRACKERS.values())}; got {value!r}.")
        if importlib.util.find_spec(kind) is None:
            raise UsageError(f"{name}={text} needs the package {kind}: run `%pip install {kind}`.")
        return text

    def show(self, value: Any) -> str:
        """See `Kind`."""
        return value or "off"


@dataclass(frozen=True, slots=True)
class Choice:
    """Off (empty), on, or a word that says more."""

    words: tuple[str, ...]

    @property
    def unit(self) -> str:
        """Name of the unit in the documentation."""
        return f"off, on or {' or '.join(self.words)}"

    def read(self, name: str, value: object) -> str:
        """See `Kind`."""
        text = str(value).strip().lower()
        if text in ("", *_OFF):
            return ""
        if text not in _ON + self.words:
            raise UsageError(f"{name} must be {self.unit}; got {value!r}.")
        return "on" if text in _ON else text

    def show(self, value: Any) -> str:
        """See `Kind`."""
        return value or "off"


@dataclass(frozen=True, slots=True)
class Frequency:
    """Off (0), on (1: each time), or every so many times."""

    what: str
    """What is counted, such as ``optimizer step``."""

    @property
    def unit(self) -> str:
        """Name of the unit in the documentation."""
        return f"on, off, or every how many {self.what}s"

    def read(self, name: str, value: object) -> int:
        """See `Kind`."""
        text = str(value).strip().lower()
        if text in _ON + _OFF:
            return int(text in _ON)
        if text.isdecimal() and int(text) <= _MAX_FREQUENCY:
            return int(text)
        raise UsageError(f"{name} must be on, off, or a number such as 10: every tenth {self.what}; got {value!r}.")

    def show(self, value: Any) -> str:
        """See `Kind`."""
        return str(value) if value > 1 else "on" if value else "off"


@dataclass(frozen=True, slots=True)
class Number:
    """A number, with or without a unit."""

    unit: str
    """``seconds``, ``bytes``, or empty: a count."""
    expected: str
    """Completes the sentence "it must be …"."""
    minimum: float
    maximum: float
    """The highest value that the code behind the setting supports."""
    is_integer: bool = False
    zero_is_valid: bool = False
    """Whether 0 is valid although it is below the minimum: it stands for a default."""
    units: Mapping[str, float] = field(default_factory=lambda: {"": 1})
    """Factor of each unit that may follow the number; lower case."""

    def read(self, name: str, value: object) -> int | float:
        """See `Kind`."""
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", _text(value))
        factor = self.units.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise self._error(name, value)
        number = float(match[1]) * factor
        if (number < self.minimum and not (number == 0 and self.zero_is_valid)) or (self.unit == "" and number % 1):
            raise self._error(name, value)
        if number > self.maximum:
            raise UsageError(f"{name} must be at most {self.show(self.maximum)}; got {value!r}.")
        return int(number) if self.is_integer else number

    def _error(self, name: str, value: object) -> UsageError:
        return UsageError(f"{name} must be {self.expected}; got {value!r}.")

    def show(self, value: Any) -> str:
        """See `Kind`."""
        if self.unit == "bytes":
            return exact_bytes(value)
        text = str(int(value)) if value == int(value) else repr(float(value))
        return f"{text} s" if self.unit == "seconds" else text


def _text(value: object) -> str:
    """Return the digits of a finite number of 0 or more; anything else becomes text that is not parsed as a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isfinite(value) and value >= 0:
        return f"{value:.17f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return repr(value)


def seconds(minimum: float = 0.0) -> Number:
    """Return the kind of durations of at least `minimum` seconds."""
    what = "a number of seconds" + (f" of at least {minimum:g}" if minimum else "")
    return Number("seconds", f"{what}, such as 300 or 5min", minimum, 1e9, units=_TIME_UNITS)


def byte_count(minimum: int, zero: str = "") -> Number:
    """Return the kind of sizes of at least `minimum` bytes; `zero` says what 0 stands for, if it is valid, too."""
    what = f"a number of bytes of at least {minimum}, such as {'' if minimum > 65536 else '65536 or '}4MiB"
    what += f", or 0 for {zero}" if zero else ""
    return Number("bytes", what, minimum, 1 << 40, is_integer=True, zero_is_valid=bool(zero), units=_SIZE_UNITS)


def count(expected: str, maximum: int) -> Number:
    """Return the kind of integers from 0 to `maximum`; `expected` completes the sentence "it must be …"."""
    return Number("", expected, 0, maximum, is_integer=True)
