"""The settings of `%distributed config key=value`: their kinds and units, defaults, and when each takes effect.

A notebook has `LiveSettings`. A cluster copies them when it starts; a setting that takes effect at once changes both.
`scripts/settings_table.py` writes docs/settings.md from the docstrings here.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct, field

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
_MAX_VALUE = 48
"""Letters of a value in a list of all settings; longer ones move what is behind them."""
_IN_FEW_WORDS = {
    "keep_alive": "how long ranks wait for a kernel that restarts",
    "idle_stop": "stop after so long without a cell; 0: never",
    "warm_up": "prepare the first start in the background",
    "output_limit": "how much text a cell shows",
    "collective_timeout": "how long a collective waits for other ranks",
    "threads": "torch's threads per rank; 0: its share of cores",
    "group_memory": "most memory of groups; 0: the usual size",
    "share": "let other programs run cells and set variables",
    "auto_repair": "replace dead ranks before the next cell",
    "undo_memory": "memory per rank for `%distributed undo`; 0: no undo",
    "log_to": "tracker that gets what `axon_nb.log` reports",
    "protect": "keep every step, or every K-th, of all ranks",
    "watch_numbers": "name where numbers differ or are not finite",
    "debug": "keep the frames of a failed cell for `debug`",
    "start_timeout": "how long a start may take",
}
"""What each setting does, for a list of all; their docstrings say more."""
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
IN_CLASS: dict[str, Any] = {"keep_alive": 30.0, "idle_stop": 1800.0, "threads": 1}
"""What suits a machine that a class shares, besides `warm_up` off; see `AXON_NB_CLASS`."""
_ASSIGNMENT = re.compile(r"\s*([^\s=]+)\s*=\s*(.*?)\s*(?=\s[^\s=]+\s*=|$)")
"""`key=value` or `key = 5 min`, up to the next one."""


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


class Switch(Struct, frozen=True):
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


class Tracker(Struct, frozen=True):
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


class Choice(Struct, frozen=True):
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


class Frequency(Struct, frozen=True):
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


class Number(Struct, frozen=True):
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


class Setting(Struct, frozen=True):
    """The metadata of a setting."""

    kind: Kind
    takes_effect: TakesEffect
    per_cluster: bool = False
    """Whether a running cluster has its own value."""


def _setting(default: Any, kind: Kind, takes_effect: TakesEffect, *, per_cluster: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"setting": Setting(kind, takes_effect, per_cluster)})


@dataclass
class Settings:
    """The value of each setting."""

    keep_alive: float = _setting(300.0, seconds(), TakesEffect.NOW, per_cluster=True)
    """How long the ranks keep running after the kernel is restarted or killed, so that `%distributed attach` can
    reconnect. Shutting the kernel down stops them at once."""
    idle_stop: float = _setting(0.0, seconds(), TakesEffect.NOW, per_cluster=True)
    """How long no cell may run until the cluster stops itself and frees its memory and GPUs, such as `30min`. It never
    stops while a cell runs. 0 is never."""
    warm_up: bool = _setting(True, Switch(), TakesEffect.NOW)
    """Whether `%load_ext axon_nb` starts the host agent in the background, which makes the first start faster. `on`
    also starts it now if no cluster is running; `off` stops one that no cluster uses."""
    output_limit: int = _setting(1 << 20, byte_count(1024), TakesEffect.NEXT_CELL, per_cluster=True)
    """How much text one cell shows, and how much each rank sends in one cell. The rest is counted, and the last lines
    are shown."""
    collective_timeout: float = _setting(1800.0, seconds(1.0), TakesEffect.NEXT_START, per_cluster=True)
    """How long a collective waits for the other ranks before it fails: in the group of all ranks, and in groups made
    with `dist.new_group` without their own `timeout=`."""
    threads: int = _setting(
        0,
        count("a whole number of threads per rank, such as 2, or 0 to share the cores evenly", 4096),
        TakesEffect.NEXT_START,
        per_cluster=True,
    )
    """Intra-op threads of torch on each rank. 0 shares the usable cores of a host evenly among its ranks."""
    group_memory: int = _setting(0, byte_count(1 << 20, zero="the default"), TakesEffect.NEXT_START, per_cluster=True)
    """How much memory the process groups of a rank share with others at most (`--backend shm`): each new group gets
    at most half of what is left. Less makes large tensors slower: they go through it in smaller pieces. 0 is the usual
    size: 20 to 81 MiB for a group, by its number of ranks, and 256 MiB in all, above which new groups are small."""
    share: bool = _setting(False, Switch(), TakesEffect.NOW)
    """Whether your other programs, such as `axon-nb run` and `axon-nb mcp`, may run cells, replace ranks, and set and
    read variables. Without it they only see what the ranks do, and can interrupt a cell."""
    auto_repair: bool = _setting(False, Switch(), TakesEffect.NOW)
    """Whether dead ranks are replaced with new, empty ones before the next cell runs."""
    undo_memory: int = _setting(64 << 20, byte_count(1 << 20, zero="no undo"), TakesEffect.NEXT_CELL)
    """How much memory each rank may use for the states before the last cells, to which `%distributed undo` returns. A
    state takes as much as the tensors and arrays that changed since the last one. Variables that do not fit are left
    out: a cell that changes them cannot be undone. 0 turns undo off."""
    log_to: str = _setting("", Tracker(), TakesEffect.NEXT_CELL)
    """Where `axon_nb.log` also writes what rank 0 reports: `tensorboard:FOLDER`, `wandb:PROJECT`, `mlflow:URI` or
    `trackio:PROJECT`. With `all:` before it, each rank writes a run. Nowhere: `off`."""
    protect: int = _setting(0, Frequency("optimizer step"), TakesEffect.NEXT_CELL)
    """Whether the state of every rank is kept, after each optimizer step, in memory that outlives the rank. After a
    death `%distributed repair` then gives the new ranks their state, and all ranks go back to the last step that all of
    them have. `protect=10` keeps every tenth step. It needs memory for two copies of what a step changes."""
    watch_numbers: str = _setting("", Choice(("stop",)), TakesEffect.NEXT_CELL)
    """Whether parameters, gradients and losses are watched at each optimizer step: where replicas first differ in a
    bit, and where the first number that is not finite arose. `stop` ends the cell there."""
    debug: bool = _setting(True, Switch(), TakesEffect.NEXT_CELL)
    """Whether a rank keeps the frames of a failed cell for `%distributed debug` until its next cell."""
    start_timeout: float = _setting(120.0, seconds(1.0), TakesEffect.NEXT_START)
    """How long the ranks may take to start and join before `%distributed start` fails."""

    @classmethod
    def known(cls) -> dict[str, Setting]:
        """Return all settings by name, in their order."""
        return {field.name: field.metadata["setting"] for field in dataclasses.fields(Settings)}

    @classmethod
    def default(cls, name: str) -> Value:
        """Return the default value of a setting."""
        value: Value = getattr(Settings, name)
        return value

    def shown(self, name: str) -> str:
        """Format a setting's value with its unit."""
        return _of(name).kind.show(getattr(self, name))

    def per_cluster(self) -> dict[str, Value]:
        """Return the settings of which a running cluster has its own values."""
        return {name: getattr(self, name) for name, setting in self.known().items() if setting.per_cluster}

    def snapshot(self) -> Settings:
        """Return a copy."""
        return Settings(**{name: getattr(self, name) for name in self.known()})


class RunningCluster(Protocol):
    """The cluster to which settings apply."""

    @property
    def settings(self) -> Settings:
        """The cluster's own values."""

    def apply_settings(self, changed: Mapping[str, Value]) -> None:
        """Apply these settings to the cluster; raises, and changes nothing, if that is impossible."""


class LiveSettings(Settings):
    """The settings of one notebook; changes also apply to its running cluster if they can."""

    def __init__(self, **values: Value) -> None:
        vars(self).update(vars(Settings(**values)))  # type: ignore[arg-type]
        vars(self).update(running=lambda: None, callbacks={}, _chosen=set())

    running: Callable[[], RunningCluster | None]
    """Returns the running cluster; None if there is none."""
    callbacks: dict[str, Callable[[Any], None]]
    """By setting, what to call with a new value, besides applying it to the cluster."""
    _chosen: set[str]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.known():
            self.set(**{name: value})
        else:
            super().__setattr__(name, value)

    def set(self, *assignments: str, **values: Value | str) -> list[str]:
        """Change settings: all of them, or none if one is invalid.

        Args:
            *assignments: One or several ``key=value`` each, with units: ``keep_alive=5min output_limit=4MiB``.
            **values: The same as keywords; numbers are in seconds or bytes.

        Returns:
            A line for each: its new value, and when it takes effect if a cluster is running.

        Raises:
            UsageError: there is no such setting, or the value is invalid.
            ClusterLostError: the cluster was lost before it got the new value.
        """
        pairs = [pair for text in assignments for pair in _pairs(text)]
        wanted = {name: _of(name).kind.read(name, value) for name, value in [*pairs, *values.items()]}
        self._apply(wanted)
        vars(self).update(wanted)
        self._chosen.update(wanted)
        return [f"{self.assigned(name)}{self._when(name)}" for name in wanted]

    def configure(self, section: Mapping[str, Any]) -> None:
        """Take values from the section `c.AxonNB` of IPython's configuration, as if they were defaults.

        What `set` has changed stays, and an attached cluster keeps its own.

        Raises:
            UsageError: there is no such setting, or a value is invalid; nothing is changed.
        """
        try:
            wanted = {name: _of(name).kind.read(name, value) for name, value in section.items()}
        except UsageError as error:
            raise UsageError(f"c.AxonNB in IPython's configuration: {error}") from None
        vars(self).update({name: value for name, value in wanted.items() if name not in self._chosen})

    def _apply(self, wanted: Mapping[str, Value]) -> None:
        cluster = self.running()
        now = {name: value for name, value in wanted.items() if _applies_to_cluster(name)}
        if cluster is not None and now:
            cluster.apply_settings(now)
        for name, value in wanted.items():
            self.callbacks.get(name, _nothing)(value)

    def assigned(self, name: str) -> str:
        """Format a setting as ``keep_alive = 300 s``."""
        return f"{name} = {self.shown(name)}"

    def _when(self, name: str) -> str:
        cluster, takes_effect = self.running(), _of(name).takes_effect
        if cluster is None:
            return ""
        if (
            takes_effect is TakesEffect.NEXT_START
            and _of(name).per_cluster
            and getattr(cluster.settings, name) == getattr(self, name)
        ):
            return " (in effect now)"
        when = "in effect now" if takes_effect is TakesEffect.NOW else takes_effect.value
        return f" ({'; '.join(self._differing(name)) or when})"

    def _differing(self, name: str) -> list[str]:
        cluster = self.running()
        if cluster is None or not _of(name).per_cluster or getattr(cluster.settings, name) == getattr(self, name):
            return []
        return [_of(name).takes_effect.value, f"this cluster keeps {cluster.settings.shown(name)}"]

    def lines(self) -> list[str]:
        """Return a line per setting: its value, and whether it differs from the default or from the cluster's."""
        lines = []
        for name, setting in self.known().items():
            default = self.default(name)
            notes = self._differing(name)
            notes += [f"default {setting.kind.show(default)}"] if getattr(self, name) != default else []
            lines.append(self.assigned(name) + (f" ({'; '.join(notes)})" if notes else ""))
        return lines

    def described(self) -> list[str]:
        """Return `lines`, each with what the setting does."""
        lines = self.lines()
        width = min(_MAX_VALUE, max(map(len, lines)))
        return [f"{line:{width}}  {_IN_FEW_WORDS[name]}" for line, name in zip(lines, self.known(), strict=True)]

    def assignments(self) -> list[str]:
        """Return all settings as they are typed: ``keep_alive=300s``."""
        return [self.assigned(name).replace(" ", "") for name in self.known()]

    def inherit(self, values: Mapping[str, Value]) -> Settings:
        """Take over the settings of a cluster that an earlier kernel started, except those that were set here.

        Args:
            values: The cluster's values, by name.

        Returns:
            The settings of that cluster.
        """
        known = {name: value for name, value in values.items() if name in self.known()}
        vars(self).update({name: value for name, value in known.items() if name not in self._chosen})
        return dataclasses.replace(self.snapshot(), **known)  # type: ignore[arg-type]

    def apply_again(self) -> None:
        """Apply what was set here to the cluster that was just attached."""
        self._apply({name: getattr(self, name) for name in self._chosen if _applies_to_cluster(name)})


def settings_facts(settings: Settings) -> dict[str, Any]:
    """Return what the host agent needs of a cluster's settings: times, and all settings for an attach."""
    return {"keep_alive_s": settings.keep_alive, "idle_stop_s": settings.idle_stop, "settings": settings.per_cluster()}


def _nothing(value: object) -> None:
    """Do nothing: most settings have no callback."""


def _applies_to_cluster(name: str) -> bool:
    setting = _of(name)
    return setting.per_cluster and setting.takes_effect is not TakesEffect.NEXT_START


def _of(name: str) -> Setting:
    known = Settings.known()
    if name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {close[0]}?" if close else "run `%distributed config` to see all, with what they do."
        raise UsageError(f"%distributed config has no setting {name!r}: {hint}")
    return known[name]


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of ``keep_alive=5min output_limit = 4 MiB``."""
    text, position = text.rstrip(), 0
    while position < len(text):
        match = _ASSIGNMENT.match(text, position)
        if match is None:
            word = text[position:].split()[0]
            name = word.partition("=")[0]
            example = f"{name}={_of(name).kind.show(Settings.default(name))}".replace(" ", "")
            raise UsageError(f"%distributed config takes key=value, such as {example}; got {word!r}.")
        yield match[1], match[2]
        position = match.end()
