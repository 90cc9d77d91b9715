"""What can be set with `%distributed config key=value`: units, defaults, and when each setting takes effect.

`settings` are those of this notebook. A cluster keeps a copy from its start; a setting that acts at once changes both.
`scripts/settings_table.py` makes docs/settings.md from the docstrings here.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from axon_nb.cluster.setting_kinds import Acts, Kind, Switch, Value, byte_count, count, seconds
from axon_nb.errors import UsageError
from axon_nb.records.environment import WARM_UP

__all__ = ["LiveSettings", "RunningCluster", "Setting", "Settings", "settings", "settings_facts"]

_ASSIGNMENT = re.compile(r"\s*([^\s=]+)\s*=\s*(.*?)\s*(?=\s[^\s=]+\s*=|$)")
"""`key=value` or `key = 5 min`, up to the next one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a setting besides its value."""

    kind: Kind
    acts: Acts
    of_cluster: bool = False
    """Whether a running cluster has a value of its own."""


def _setting(default: Any, kind: Kind, acts: Acts, *, of_cluster: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"setting": Setting(kind, acts, of_cluster)})


@dataclass
class Settings:
    """The value of each setting."""

    keep_alive: float = _setting(300.0, seconds(), Acts.NOW, of_cluster=True)
    """How long the ranks live on after the kernel is restarted or killed, so that `%distributed attach` can reconnect.
    Shutting the kernel down ends them at once."""
    warm_up: bool = _setting(True, Switch(), Acts.NOW)
    """Whether `%load_ext axon_nb` starts the host agent in the background, which makes the first start faster. `on`
    also starts it now if no cluster runs; `off` ends one that no cluster uses."""
    output_limit: int = _setting(1 << 20, byte_count(1024), Acts.NEXT_CELL, of_cluster=True)
    """How much text one cell shows, and how much each rank sends in one cell. The rest is counted, and the last lines
    are shown."""
    collective_timeout: float = _setting(1800.0, seconds(1.0), Acts.NEXT_START, of_cluster=True)
    """How long a collective waits for the other ranks before it fails: in the group of all ranks, and in groups made
    with `dist.new_group` without a `timeout=` of their own."""
    threads: int = _setting(
        0,
        count("a whole number of threads per rank, such as 2, or 0 to share the cores evenly", 4096),
        Acts.NEXT_START,
        of_cluster=True,
    )
    """Intra-op threads of torch on each rank. 0 shares the usable cores of a host evenly among its ranks."""
    auto_repair: bool = _setting(False, Switch(), Acts.NOW)
    """Whether dead ranks are replaced with new, empty ones before the next cell runs."""
    debug: bool = _setting(True, Switch(), Acts.NEXT_CELL)
    """Whether a rank keeps the frames of a failed cell for `%distributed debug` until its next cell."""
    start_timeout: float = _setting(120.0, seconds(1.0), Acts.NEXT_START)
    """How long `%distributed start` may take before it fails."""

    @classmethod
    def known(cls) -> dict[str, Setting]:
        """All settings by name, in their order."""
        return {field.name: field.metadata["setting"] for field in dataclasses.fields(Settings)}

    @classmethod
    def default(cls, name: str) -> Value:
        """What a setting is unless it is set."""
        value: Value = getattr(Settings, name)
        return value

    def shown(self, name: str) -> str:
        """A setting's value with its unit."""
        return _of(name).kind.show(getattr(self, name))

    def of_cluster(self) -> dict[str, Value]:
        """The settings of which a running cluster has its own values."""
        return {name: getattr(self, name) for name, setting in self.known().items() if setting.of_cluster}

    def snapshot(self) -> Settings:
        """A copy that nobody else changes."""
        return Settings(**{name: getattr(self, name) for name in self.known()})


class RunningCluster(Protocol):
    """The cluster on which settings act."""

    @property
    def settings(self) -> Settings:
        """The cluster's own values."""

    def take_settings(self, changed: Mapping[str, Value]) -> None:
        """Have these settings act on the cluster; raises, and changes nothing, when that is not possible."""


class LiveSettings(Settings):
    """The settings of this process. What is set here acts on its running cluster, or says that it does not."""

    def __init__(self, **values: Value) -> None:
        vars(self).update(vars(Settings(**values)))  # type: ignore[arg-type]
        vars(self).update(running=lambda: None, acting={}, _chosen=set())

    running: Callable[[], RunningCluster | None]
    """The cluster that runs now."""
    acting: dict[str, Callable[[Any], None]]
    """What a new value does now, by setting, besides what the cluster does."""
    _chosen: set[str]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.known():
            self.set(**{name: value})
        else:
            super().__setattr__(name, value)

    def set(self, *assignments: str, **values: Value | str) -> list[str]:
        """Change settings, all of them or, when one is wrong, none.

        Args:
            *assignments: Each one or several ``key=value``, with units: ``keep_alive=5min output_limit=4MiB``.
            **values: The same as keywords; numbers are in seconds or bytes.

        Returns:
            A line for each: what is now set, and when it takes effect if a cluster is running.

        Raises:
            UsageError: there is no such setting, or the value does not fit.
            ClusterLostError: the cluster ended before it got the new value.
        """
        given = [pair for text in assignments for pair in _pairs(text)]
        wanted = {name: _of(name).kind.read(name, value) for name, value in [*given, *values.items()]}
        self._act(wanted)
        vars(self).update(wanted)
        self._chosen.update(wanted)
        return [f"{self.assigned(name)}{self._when(name)}" for name in wanted]

    def _act(self, wanted: Mapping[str, Value]) -> None:
        cluster = self.running()
        now = {name: value for name, value in wanted.items() if _acts_on_cluster(name)}
        if cluster is not None and now:
            cluster.take_settings(now)
        for name, value in wanted.items():
            self.acting.get(name, _nothing)(value)

    def assigned(self, name: str) -> str:
        """``keep_alive = 300 s``."""
        return f"{name} = {self.shown(name)}"

    def _when(self, name: str) -> str:
        cluster, acts = self.running(), _of(name).acts
        if cluster is None:
            return ""
        if acts is Acts.NEXT_START and _of(name).of_cluster and getattr(cluster.settings, name) == getattr(self, name):
            return " (in effect now)"
        return f" ({'; '.join(self._differing(name)) or ('in effect now' if acts is Acts.NOW else acts.value)})"

    def _differing(self, name: str) -> list[str]:
        cluster = self.running()
        if cluster is None or not _of(name).of_cluster or getattr(cluster.settings, name) == getattr(self, name):
            return []
        return [_of(name).acts.value, f"this cluster keeps {cluster.settings.shown(name)}"]

    def lines(self) -> list[str]:
        """All settings, a line each: the value, and where it is not the default or not what the cluster has."""
        lines = []
        for name, setting in self.known().items():
            default = self.default(name)
            notes = self._differing(name)
            notes += [f"default {setting.kind.show(default)}"] if getattr(self, name) != default else []
            lines.append(self.assigned(name) + (f" ({'; '.join(notes)})" if notes else ""))
        return lines

    def assignments(self) -> list[str]:
        """All settings as they are typed: ``keep_alive=300s``."""
        return [self.assigned(name).replace(" ", "") for name in self.known()]

    def take_over(self, kept: Mapping[str, Value]) -> Settings:
        """Take the settings of a cluster that an earlier kernel left, except those that have been set here.

        Args:
            kept: What the cluster has, by name.

        Returns:
            The settings of that cluster.
        """
        known = {name: value for name, value in kept.items() if name in self.known()}
        vars(self).update({name: value for name, value in known.items() if name not in self._chosen})
        return dataclasses.replace(self.snapshot(), **known)  # type: ignore[arg-type]

    def act_again(self) -> None:
        """Have what was set here act on the cluster that has just been attached."""
        self._act({name: getattr(self, name) for name in self._chosen if _acts_on_cluster(name)})


def settings_facts(own: Settings) -> dict[str, Any]:
    """What the host agent knows of a cluster's settings: how long to keep it alive, and all for who attaches."""
    return {"keep_alive_s": own.keep_alive, "settings": own.of_cluster()}


def _nothing(value: object) -> None:
    """What most settings do when they are set."""


def _acts_on_cluster(name: str) -> bool:
    setting = _of(name)
    return setting.of_cluster and setting.acts is not Acts.NEXT_START


def _of(name: str) -> Setting:
    known = Settings.known()
    if name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it is one of {', '.join(known)}."
        raise UsageError(f"%distributed config has no setting {name!r}: {hint}")
    return known[name]


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """The keys and values of ``keep_alive=5min output_limit = 4 MiB``."""
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


settings = LiveSettings(warm_up=WARM_UP.is_enabled())
"""The settings of this process."""
