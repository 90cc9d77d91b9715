"""The report of a resize: what it carried over, copied and dropped, as a record and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from axon_nb.cluster.recovery.report import Copied
from axon_nb.records.protocol.joining import Committed
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes


@dataclass(frozen=True, slots=True)
class ResizeReport:
    """The result of `Cluster.resize`; displays as text."""

    old_size: int
    """Number of ranks before."""
    new_size: int
    """Number of ranks now."""
    models: int = 0
    """DDP, FSDP2 and ZeRO models that were adapted."""
    samplers: int = 0
    """Samplers that split their dataset over the new number of ranks."""
    functions: int = 0
    """Functions registered with `axon_nb.on_resize`, which all ranks called."""
    copied: tuple[str, ...] = ()
    """Names of the variables that new ranks got."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why new ranks did not get each other variable; reads after its name."""
    size: int = 0
    """Bytes copied to each new rank."""
    groups_left: tuple[str, ...] = ()
    """Variables of process groups that are gone, because some of their ranks have left."""

    @classmethod
    def of(cls, old: int, new: int, copied: Copied, committed: Sequence[Committed]) -> ResizeReport:
        """Build the report from what each rank of the new world reports."""
        return cls(
            old,
            new,
            models=max(one.models for one in committed),
            samplers=max(one.samplers for one in committed),
            functions=max(one.functions for one in committed),
            copied=copied.names,
            skipped=dict(copied.skipped),
            size=copied.size,
            groups_left=tuple(sorted({name for one in committed for name in one.groups_left})),
        )

    def lines(self) -> list[str]:
        """Return the report as lines."""
        changed = name_ranks(range(min(self.old_size, self.new_size), max(self.old_size, self.new_size)))
        one = abs(self.new_size - self.old_size) == 1
        if self.new_size > self.old_size:
            what = f"{changed} {'is' if one else 'are'} new, with {self._copied()}"
        else:
            what = f"{changed} left"
        lines = [
            f"Resized the world from {self.old_size} to {self.new_size} ranks: {what}. The others keep their state."
        ]
        adapted = [(self.models, "model"), (self.samplers, "sampler")]
        if counts := [f"{count} {noun}{'s' * (count != 1)}" for count, noun in adapted if count]:
            lines.append(f"Adapted {' and '.join(counts)} to {self.new_size} ranks.")
        lines += [f"Not copied: `{name}` {reason}." for name, reason in sorted(self.skipped.items())]
        if self.groups_left:
            shown = ", ".join(f"`{name}`" for name in self.groups_left)
            lines.append(f"Some ranks of {shown} left: recreate with `dist.new_group` on all ranks.")
        return lines

    def _copied(self) -> str:
        shown = ", ".join(f"`{name}`" for name in self.copied[:8])
        more = f" and {len(self.copied) - 8} more" if len(self.copied) > 8 else ""
        return f"{shown}{more} of rank 0 ({format_bytes(self.size)})" if self.copied else "no variable"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__
