"""What torch computes wrong without an error: `wrong_numbers.toml`, and what of it the installed version has."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

DATA = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that torch computes wrong, without an error."""

    name: str
    what: str
    """What is wrong, and when, as a clause."""
    instead: str
    """What to do, as an imperative."""
    source: str
    """URL of the report or of torch's own source."""
    wrong: tuple[str, ...]
    """Versions in which it was wrong, such as ``2.13``."""
    right: tuple[str, ...]
    """Versions in which it was right."""
    on: tuple[str, ...] = ()
    """The backends that have it; empty: all."""
    gpus: bool = False
    """Whether only GPUs show it."""
    is_corrected: bool = False
    """Whether ranks in cells compute it right nevertheless; scripts under torchrun do not."""

    def __str__(self) -> str:
        return f"{self.what[0].upper()}{self.what[1:]}. {self.instead}"

    def is_in(self, version: str) -> bool:
        """Whether a torch has it: as the newest version up to it in which it was looked for, else as the oldest."""
        tried = sorted((*self.wrong, *self.right), key=_release)
        older = [each for each in tried if _release(each) <= _release(version)]
        return bool(_release(version)) and (older or tried)[-1 if older else 0] in self.wrong


def _release(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()


def faults() -> list[Fault]:
    """Return all that are known."""
    tables: list[dict[str, Any]] = tomllib.loads(DATA.read_text(encoding="utf-8"))["fault"]
    lists = ("wrong", "right", "on")
    return [Fault(**{**one, **{key: tuple(one.get(key, ())) for key in lists}}) for one in tables]


def faults_of(version: str, backend: str = "") -> list[Fault]:
    """Return those of a torch, as far as a backend has them.

    Args:
        version: Its version, such as ``2.15.0+cu132``.
        backend: ``shm``, ``gloo`` or ``nccl``; empty: any.
    """
    return [one for one in faults() if one.is_in(version) and not (backend and one.on and backend not in one.on)]


def note(version: str, backend: str) -> str:
    """Return the line that says how many faults of a torch the ranks on a backend can meet; empty if none."""
    count = sum(not one.is_corrected for one in faults_of(version, backend))
    things = f"{count} thing{'s' if count > 1 else ''}"
    return f"torch {version} computes {things} wrong without an error that these ranks can meet." if count else ""


def listing() -> str:
    """List those of the installed torch, one paragraph each; empty without torch."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
    lines = [f"- {one}" for one in faults_of(version)]
    return "\n".join([f"torch {version}, which is installed:", *(lines or ["none known"])])
