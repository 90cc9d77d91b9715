"""The numbers of `tests/budgets.toml`: read, compared with what was measured, and lowered."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.budgets.measurement import Costs

PATH = Path(__file__).parents[1] / "budgets.toml"
KINDS = {
    "cell.calls": "calls of Python functions, in all threads",
    "cell.messages": "messages on a socket",
    "cell.bytes": "bytes on a socket",
    "cell.system_calls": "system calls but those that wait for locks; only where `perf` may count them",
    "start.modules": "modules imported",
    "start.threads": "threads",
    "start.open_files": "open files",
    "start.own_memory_mib": "MiB of memory that a rank shares with no other process",
}
WELL_BELOW = 0.9
TOO_VARIED = {"cell.system_calls"}
"""On a busy machine, one call may do what are two otherwise."""
_HEADER = """\
# What an empty cell and a start may cost with two ranks, in counts. tests/budgets measures it on a real cluster, and
# `make test` fails when a number is exceeded.
#
# Raise a number only in a commit that says why. `python -m tests.budgets --update` lowers them on an idle machine, and
# `--functions` lists which functions are called. The numbers hold for the versions in [environment].
"""


@dataclass(frozen=True)
class Budgets:
    """What is allowed."""

    environment: Mapping[str, str]
    slack: Mapping[str, float]
    """By kind, the share by which a number may be exceeded: what varies from run to run."""
    forbidden: Mapping[str, list[str]]
    """Modules that must not be imported at the start, by process."""
    limits: Costs

    @classmethod
    def read(cls, text: str) -> Budgets:
        """Parse the file."""
        content: dict[str, Any] = tomllib.loads(text)
        limits = {kind: content.get(kind.partition(".")[0], {}).get(kind.partition(".")[2], {}) for kind in KINDS}
        return cls(content["environment"], content["slack"], content["forbidden"], limits)

    def text(self) -> str:
        """Format as the file."""
        lines = [_HEADER]
        tables: dict[str, tuple[str, Mapping[str, Any]]] = {
            "environment": ("", self.environment),
            "slack": ("The share by which a number may be exceeded, as it varies from run to run.", self.slack),
            "forbidden": ("Modules that a start must not import.", self.forbidden),
        }
        tables |= {
            kind: (f"{KINDS[kind][0].upper()}{KINDS[kind][1:]}.", limits) for kind, limits in self.limits.items()
        }
        for name, (comment, table) in tables.items():
            quoted = ".".join(f'"{part}"' if not part.replace("_", "").isalnum() else part for part in name.split("."))
            lines += [f"# {comment}"] if comment else []
            lines += [f"[{quoted}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items()), ""]
        return "\n".join(lines)

    def other_versions(self, environment: Mapping[str, str]) -> str:
        """Return how this environment differs from the one of the numbers; empty: not at all."""
        differ = {name: text for name, text in self.environment.items() if environment.get(name) != text}
        return ", ".join(f"{name} {environment.get(name)} (budgets: {text})" for name, text in differ.items())

    def exceeded(self, costs: Costs) -> dict[str, list[str]]:
        """Return a sentence for each number that is too large, by kind."""
        found: dict[str, list[str]] = {}
        for kind, measured in costs.items():
            slack = self.slack.get(kind, 0.0)
            for name, number in measured.items():
                limit = self.limits[kind].get(name, 0)
                if number > limit * (1 + slack):
                    more = f" and {slack:.0%}" if slack else ""
                    found.setdefault(kind, []).append(
                        f"{kind}, {name}: {number:g}, the budget is {limit:g}{more} ({KINDS[kind]}). Make it cheaper, "
                        "or raise the number in tests/budgets.toml in a commit that says why."
                    )
        return found

    def well_below(self, costs: Costs) -> dict[str, list[str]]:
        """Return a sentence for each number that is so small that its budget should follow, by kind."""
        found: dict[str, list[str]] = {}
        for kind, measured in costs.items():
            for name, limit in self.limits[kind].items() if kind not in TOO_VARIED else ():
                if (number := measured.get(name, 0)) < limit * WELL_BELOW:
                    found.setdefault(kind, []).append(
                        f"{kind}, {name}: only {number:g}, the budget is {limit:g}. Lower it: "
                        "run `python -m tests.budgets --update` on an idle machine."
                    )
        return found

    def lowered(self, costs: Costs, environment: Mapping[str, str]) -> Budgets:
        """Return budgets that follow what got cheaper; for other versions than before, as measured."""
        limits: Costs = {}
        for kind, before in self.limits.items():
            now = costs.get(kind)
            if now is None or self.other_versions(environment):
                limits[kind] = dict(before if now is None else now)
                continue
            noise = 1 - self.slack.get(kind, 0.0) / 2
            limits[kind] = {
                name: now[name] if now[name] < limit * noise else limit for name, limit in before.items() if name in now
            }
        return Budgets(environment, self.slack, self.forbidden, limits)


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() and name.isascii() else f'"{name}"'


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if value < 1000 else str(round(value))
