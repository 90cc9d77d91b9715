"""The report of a repair: what it replaced, copied and lost, as a record and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from axon_nb.records.protocol.recovery import LostShards
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.units import format_bytes


@dataclass(frozen=True, slots=True)
class LostPart(LostShards):
    """A variable of which the replaced ranks held a part that no other rank has."""

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
class Returned:
    """The step to which all ranks have returned."""

    step: int
    """Steps of the optimizer that has made most."""
    repeated: int
    """How many steps the rank that was furthest had made since."""
    refused: Mapping[int, Sequence[str]]
    """By rank, a line for each object that refused its state."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of `Cluster.repair`; displays as text."""

    ranks: tuple[int, ...]
    """The replaced ranks; empty if only the process groups were rebuilt."""
    kept: tuple[int, ...]
    """The other ranks, which keep their state."""
    reasons: dict[int, str]
    """Why each replaced rank was dead; reads after its name. Empty for a live one that was replaced on request."""
    source: int | None = None
    """The rank whose variables were copied; None: the replaced ranks are empty."""
    copied: tuple[str, ...] = ()
    """Names of the copied variables."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why each other variable could not be copied; reads after its name."""
    size: int = 0
    """Bytes copied to each replaced rank."""
    lost: tuple[LostPart, ...] = ()
    """What only the replaced ranks held."""
    returned: Returned | None = None
    """The protected step to which all ranks have returned; None: they are where they were."""

    @classmethod
    def of(
        cls,
        ranks: Sequence[int],
        kept: Sequence[int],
        *,
        reasons: Mapping[int, str],
        source: int | None,
        copied: Copied | None,
        lost: Mapping[int, Sequence[LostShards]],
        returned: Returned | None = None,
    ) -> RepairReport:
        """Build the report; `lost` is what each survivor reports, of which the largest part of a variable counts."""
        parts: dict[str, LostPart] = {}
        for records in lost.values():
            for record in records:
                part = LostPart(record.name, record.kind, record.parts, record.of, record.bytes)
                if part.name not in parts or part.bytes > parts[part.name].bytes:
                    parts[part.name] = part
        copies = copied or Copied()
        return cls(
            tuple(ranks),
            tuple(kept),
            dict(reasons),
            source,
            copies.names,
            dict(copies.skipped),
            copies.size,
            tuple(parts.values()) if returned is None else (),
            returned,
        )

    def lines(self, *, why: bool = False) -> list[str]:
        """Return the report as lines; with `why`, also say why the ranks were dead."""
        if not self.ranks:
            return ["Rebuilt the process groups. All ranks keep their state."]
        one, replaced = len(self.ranks) == 1, name_ranks(self.ranks)
        reasons = ", ".join(dict.fromkeys(reason for reason in self.reasons.values() if reason)) if why else ""
        clause = f", which {reasons}" if reasons else ""
        if self.returned is not None:
            return self._returned_lines(f"Replaced {replaced}{clause}")
        content = "new and empty" if self.source is None else self._copied()
        others = "All other ranks keep their state." if self.kept else "No rank keeps its state."
        lines = [f"Replaced {replaced}{clause}: {content}. {others}"]
        lines += [f"Not copied: `{name}` {reason}." for name, reason in sorted(self.skipped.items())]
        if self.lost:
            pronoun = "its part" if one else "their part"
            parts = " and ".join(str(part).replace("its part", pronoun) for part in self.lost)
            lines.append(f"Only {replaced} held {parts}: load a checkpoint on all ranks, or recreate them.")
        return lines

    def _returned_lines(self, replaced: str) -> list[str]:
        assert self.returned is not None
        step, repeated = self.returned.step, self.returned.repeated
        work = f"{repeated} step{'s' * (repeated != 1)} must be repeated" if repeated else "no step is lost"
        lines = [f"{replaced}. All ranks are back at step {step}: {work}."]
        refused = {line: rank for rank, all_lines in self.returned.refused.items() for line in all_lines}
        return [f"Not restored on rank {rank}: {line}." for line, rank in refused.items()] + lines

    def _copied(self) -> str:
        shown = ", ".join(f"`{name}`" for name in self.copied[:8])
        more = f" and {len(self.copied) - 8} more" if len(self.copied) > 8 else ""
        what = f"{shown}{more} ({format_bytes(self.size)})" if self.copied else "no variable"
        return f"new, with {what} and the random state of rank {self.source}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__
