"""What can be set with `%distributed config key=value`, with units, defaults and checks."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass

from axon_nb.errors import UsageError

__all__ = ["Settings", "settings"]

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass
class Settings:
    """The settings of this notebook; a new cluster takes them as they are at its start."""

    keep_alive: float = 300.0
    """Seconds for which ranks live on after the kernel was restarted or killed."""
    warm_up: bool = True
    """Whether `%load_ext axon_nb` starts the host agent in the background; AXON_NB_WARM_UP=0 is off from the start."""
    output_limit: int = 1 << 20
    """Bytes of text that one cell shows."""
    collective_timeout: float = 1800.0
    """Seconds after which a collective that nobody joins fails."""
    threads: int = 0
    """Intra-op threads of torch on each rank; 0: usable cores / ranks of the host, at least 1."""
    auto_repair: bool = False
    """Whether the next cell replaces dead ranks by fresh, empty ones before it runs; acts at once."""
    debug: bool = True
    """Whether a rank keeps the frames of a failed cell for `%distributed debug` until its next cell; acts at once."""
    start_timeout: float = 120.0
    """Seconds that a start may take."""

    def set(self, assignment: str) -> str:
        """Carry out one ``key=value``; returns what is now set, as one line.

        Raises:
            UsageError: no such key, or a value that does not fit.
        """
        key, equals, text = assignment.partition("=")
        fields = {field.name: field for field in dataclasses.fields(self)}
        if key not in fields or not equals:
            raise UsageError(f"config takes key=value with a key of {', '.join(fields)}; got {assignment!r}.")
        value = _parse(key, text.strip(), getattr(self, key))
        setattr(self, key, value)
        return f"{key} = {value}"

    def lines(self) -> list[str]:
        """All settings, a line each."""
        return [f"{field.name} = {getattr(self, field.name)}" for field in dataclasses.fields(self)]


def _parse(key: str, text: str, now: object) -> object:
    if isinstance(now, bool):
        if text.lower() in ("on", "true", "1", "yes"):
            return True
        if text.lower() in ("off", "false", "0", "no"):
            return False
        raise UsageError(f"{key} is on or off; got {text!r}.")
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text)
    unit = match.group(2).lower() if match else ""
    if match is None or (unit and unit != "s" and unit not in _UNITS):
        raise UsageError(f"{key} takes a number that is not negative, such as {now}; got {text!r}.")
    number = float(match.group(1)) * (1 if unit == "s" else _UNITS[unit])
    return int(number) if isinstance(now, int) else number


settings = Settings(warm_up=os.environ.get("AXON_NB_WARM_UP", "1").lower() not in ("0", "off", "false", "no"))
"""The settings of this process."""
