"""What works with the installed versions: the verdict of the self-test, from rank to notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["Capability", "Verdict"]


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing that rests on private parts of other packages, and whether it works here."""

    name: str
    """Short and stable, such as ``release``."""
    label: str
    """What it does, as a verb phrase."""
    works: bool
    lost: str
    """What a user loses without it, as a clause."""
    reason: str = ""
    """Why it does not work; empty when it does."""
    fix: str = ""
    """The command that gets it back; empty when it works."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the self-test found."""

    torch: str
    """Version of torch, such as ``2.15.0+cu132``."""
    python: str
    seconds: float
    """How long the test ran."""
    capabilities: tuple[Capability, ...]

    @property
    def lost(self) -> list[Capability]:
        """What does not work."""
        return [capability for capability in self.capabilities if not capability.works]

    def without_passed(self) -> Verdict:
        """The same verdict with the capabilities alone that do not work."""
        return replace(self, capabilities=tuple(self.lost))

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return {**asdict(self), "capabilities": [asdict(capability) for capability in self.capabilities]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Verdict:
        """From what `to_json` returned.

        Raises:
            KeyError: a field is missing.
            TypeError: a field is unknown, or not of its type.
        """
        capabilities: Sequence[Mapping[str, Any]] = content["capabilities"]
        return cls(
            torch=str(content["torch"]),
            python=str(content["python"]),
            seconds=float(content["seconds"]),
            capabilities=tuple(Capability(**capability) for capability in capabilities),
        )
