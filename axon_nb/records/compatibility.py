"""Versions that axon_nb was tested with, and results of the self-test, which ranks send to the notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from packaging.version import InvalidVersion, Version

TESTED = {
    "torch": ("2.11", "2.16"),
    "ipykernel": ("7.4", "8"),
    "ipython": ("9.13", "10"),
    "ipyparallel": ("9.1", "10"),
}
"""By package: the lowest version that passed the tests, and the first version above the tested range."""


@dataclass(frozen=True, slots=True)
class Capability:
    """A feature that relies on private APIs of other packages, and whether it works here."""

    name: str
    """Short and stable identifier, such as ``release``."""
    label: str
    """What it does, as a verb phrase."""
    works: bool
    lost: str
    """What users lose without it, as a clause."""
    reason: str = ""
    """Why it does not work; empty if it does."""
    fix: str = ""
    """Command that restores it; empty if it works."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the self-test."""

    torch: str
    """Version of torch, such as ``2.15.0+cu132``."""
    python: str
    seconds: float
    """Duration of the test."""
    capabilities: tuple[Capability, ...]

    @property
    def lost(self) -> list[Capability]:
        """The capabilities that do not work."""
        return [capability for capability in self.capabilities if not capability.works]

    def without_passed(self) -> Verdict:
        """Return a copy with only the capabilities that do not work."""
        return replace(self, capabilities=tuple(self.lost))

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON."""
        return {**asdict(self), "capabilities": [asdict(capability) for capability in self.capabilities]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Verdict:
        """Restore from the result of `to_json`.

        Raises:
            KeyError: a field is missing.
            TypeError: a field is unknown or has the wrong type.
        """
        capabilities: Sequence[Mapping[str, Any]] = content["capabilities"]
        return cls(
            torch=str(content["torch"]),
            python=str(content["python"]),
            seconds=float(content["seconds"]),
            capabilities=tuple(Capability(**capability) for capability in capabilities),
        )


def are_tested(versions: Mapping[str, str]) -> bool:
    """Whether all these versions, by package, are in the tested ranges."""
    return all(
        release(TESTED[package][0]) <= release(version) < release(TESTED[package][1])
        for package, version in versions.items()
    )


def release(version: str) -> tuple[int, ...]:
    """Return major and minor number of a version such as ``2.15.0+cu132``, also of a nightly build; empty: unknown."""
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()


def install_command(package: str) -> str:
    """The command that installs a tested version of `package`."""
    lowest, above = TESTED[package]
    return f'pip install "{package}>={lowest},<{above}"'
