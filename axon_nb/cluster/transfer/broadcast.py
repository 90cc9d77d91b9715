"""`sync`: models, optimizers and schedulers of one rank, copied to all others in place.

`seed`: the random generators of all ranks, alike or each its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from axon_nb.errors import UsageError
from axon_nb.records.protocol.messages import RankCall, cell_source
from axon_nb.records.protocol.transfer import BroadcastModels, DescribeModels, Seed, SyncRecord
from axon_nb.records.ranks import format_ranks
from axon_nb.records.units import format_bytes

if TYPE_CHECKING:
    from axon_nb.cluster.cells.manager import CellManager

__all__ = ["SyncReport", "plan_sync", "seed", "sync"]

_INSTEAD = "load a checkpoint on all ranks, or build it anew"


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What `Cluster.sync` has copied; its text says so."""

    source: int
    """The rank that all others are like now."""
    copied: tuple[str, ...]
    """Names of the variables."""
    size: int
    """Bytes of the modules among them."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why each of the others was not; reads after its name."""

    def __str__(self) -> str:
        names = ", ".join(f"`{name}`" for name in self.copied)
        lines = [f"All ranks now have {names} of rank {self.source} ({format_bytes(self.size)} of weights)."]
        lines += [f"Not copied: `{name}` {why}: {_INSTEAD}." for name, why in self.skipped.items()]
        return "\n".join(lines)

    __repr__ = __str__


def plan_sync(
    told: Mapping[int, Mapping[str, SyncRecord]], source: int, names: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Which variables to copy, in order, and why the others cannot be.

    Args:
        told: By rank and name what each rank has.
        source: The rank to copy from.
        names: What the user named; empty: all that rank `source` has.

    Raises:
        UsageError: one that was named cannot be copied, or there is nothing to copy.
    """
    skipped = {name: why for name in names or told[source] if (why := _why_not(told, source, name))}
    if names and skipped:
        name, why = next(iter(skipped.items()))
        raise UsageError(f"`{name}` {why}: {_INSTEAD}; `%distributed sync` copies what every rank has a whole copy of.")
    possible = [name for name in told[source] if name not in skipped]
    chosen = [
        name for name in possible if not all(told[rank][name].within in possible for rank in told)
    ]  # the others come with what holds them
    if not chosen:
        more = "".join(f" `{name}` {why}." for name, why in skipped.items())
        raise UsageError(f"Rank {source} has no module, optimizer or scheduler that can be copied.{more}")
    return chosen, {name: why for name, why in skipped.items() if told[source][name].within not in skipped}


def _why_not(told: Mapping[int, Mapping[str, SyncRecord]], source: int, name: str) -> str:
    absent = [rank for rank in told if name not in told[rank]]
    if absent:
        return f"is no variable of rank{'s' if len(absent) > 1 else ''} {format_ranks(absent)}"
    reasons = [told[rank][name].why_not for rank in told if told[rank][name].why_not]
    if reasons:
        return reasons[0]
    own = told[source][name]
    other = [rank for rank in told if (told[rank][name].kind, told[rank][name].digest) != (own.kind, own.digest)]
    return f"has other types or shapes on rank{'s' if len(other) > 1 else ''} {format_ranks(other)}" if other else ""


def sync(cells: CellManager, source: int, names: Sequence[str]) -> SyncReport:
    """See `Cluster.sync`."""
    if source not in cells.state.ranks:
        raise UsageError(f"--from {source}: ranks are 0 to {cells.state.world_size - 1}.")
    if cells.state.busy:
        raise UsageError(
            f"Ranks {format_ranks(cells.state.busy)} still run a cell: wait for its end or interrupt it first."
        )
    told: Mapping[int, Mapping[str, SyncRecord]] = _ask(cells, DescribeModels(tuple(names)))
    chosen, skipped = plan_sync(told, source, names)
    _ask(cells, BroadcastModels(source, tuple(chosen)))
    size = sum(told[source][name].bytes for name in chosen if told[source][name].kind == "module")
    return SyncReport(source, tuple(chosen), size, skipped)


def _ask(cells: CellManager, call: RankCall[Any]) -> Mapping[int, Any]:
    # As a cell: a death, an interrupt or a failure in the middle ends it as it ends any other.
    return cells.run(cell_source(call), quiet=True).values


_MAX = (1 << 63) - 1


def seed(cells: CellManager, value: int, *, per_rank: bool = False) -> str:
    """Seed `random`, NumPy and torch (every device) on all ranks; says what was done.

    Args:
        cells: The cells of the cluster.
        value: The seed.
        per_rank: Whether each rank gets the sum of `value` and its number.

    Raises:
        UsageError: a seed that torch does not take.
    """
    if not 0 <= value <= _MAX - cells.state.world_size:
        raise UsageError(f"seed {value}: it is a whole number from 0 to {_MAX - cells.state.world_size}.")
    cells.run(cell_source(Seed(value, per_rank)), quiet=True)
    what = f"random, numpy and torch are seeded on ranks {format_ranks(cells.state.ranks)}"
    if per_rank:
        return f"{what}: with {value} on rank 0, {value + 1} on rank 1 and so on."
    return f"{what}, all with {value}."
