"""What a repair did, what it copied, and what is lost: as a record and as the lines that the user reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from axon_nb.records.protocol.recovery import HeldAlone
from axon_nb.records.ranks import format_ranks
from axon_nb.records.units import format_bytes

__all__ = ["Copied", "LostPart", "RepairReport"]


@dataclass(frozen=True, slots=True)
class LostPart(HeldAlone):
    """A variable whose part on the replaced ranks no other rank holds."""

    def __str__(self) -> str:
        if isinstance(self.parts, tuple):
            return f"stage {format_ranks(self.parts)} of {self.of} (`{self.name}`)"
        what = {"module": "parameters", "optimizer": "state tensors"}.get(self.kind)
        count = f"{self.parts} of {self.of} {what}, " if what else ""
        return f"its part of `{self.name}` ({count}{format_bytes(self.bytes)})"


@dataclass(frozen=True, slots=True)
class Copied:
    """Variables that were copied to the replaced ranks."""

    names: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why each of the others could not be; reads after its name."""
    size: int = 0
    """Bytes, to each rank."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of `Cluster.repair`; its text says what the user needs to know."""

    ranks: tuple[int, ...]
    """The ranks that were replaced."""
    kept: tuple[int, ...]
    """The other ranks, which keep all they have."""
    reasons: dict[int, str]
    """Why each was dead; reads after its name. Empty for one that lived and was replaced on request."""
    source: int | None = None
    """The rank whose variables were copied; None: the replaced ranks are empty."""
    copied: tuple[str, ...] = ()
    """Names of the variables that were copied."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why each of the others could not be; reads after its name."""
    size: int = 0
    """Bytes that were copied to each replaced rank."""
    lost: tuple[LostPart, ...] = ()
    """What only the replaced ranks held."""

    @classmethod
    def of(
        cls,
        ranks: Sequence[int],
        kept: Sequence[int],
        *,
        reasons: Mapping[int, str],
        source: int | None,
        copied: Copied | None,
        lost: Mapping[int, Sequence[HeldAlone]],
    ) -> RepairReport:
        """From what the survivors say; `lost` is their answers by rank, of which the largest part counts."""
        parts: dict[str, LostPart] = {}
        for told in lost.values():
            for record in told:
                part = LostPart(record.name, record.kind, record.parts, record.of, record.bytes)
                if part.name not in parts or part.bytes > parts[part.name].bytes:
                    parts[part.name] = part
        chosen = copied or Copied()
        return cls(
            tuple(ranks),
            tuple(kept),
            dict(reasons),
            source,
            chosen.names,
            dict(chosen.skipped),
            chosen.size,
            tuple(parts.values()),
        )

    def lines(self, *, why: bool = False) -> list[str]:
        """What to tell the user; with `why` also what became of the ranks."""
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {format_ranks(self.ranks)}"
        reasons = ", ".join(dict.fromkeys(reason for reason in self.reasons.values() if reason)) if why else ""
        began = "fresh and empty" if self.source is None else self._copied()
        told = f", which {reasons}" if reasons else ""
        others = "the other ranks keep all they have" if self.kept else "no rank keeps anything"
        lines = [f"Replaced {who}{told}: {began}; {others}."]
        lines += [f"Not copied: `{name}` {reason}." for name, reason in sorted(self.skipped.items())]
        if self.lost:
            plural = "its part" if len(self.ranks) == 1 else "their part"
            parts = " and ".join(str(part).replace("its part", plural) for part in self.lost)
            lines.append(f"Only {who} held {parts}: load a checkpoint into them on all ranks, or build them anew.")
        return lines

    def _copied(self) -> str:
        shown = ", ".join(f"`{name}`" for name in self.copied[:8])
        more = f" and {len(self.copied) - 8} more" if len(self.copied) > 8 else ""
        what = f"{shown}{more} ({format_bytes(self.size)})" if self.copied else "no variable"
        return f"fresh, with {what} and the random state of rank {self.source}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__
