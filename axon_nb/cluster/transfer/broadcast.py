"""Copies one rank's models, optimizers and schedulers to all others (`sync`); seeds all ranks (`seed`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from axon_nb.errors import UsageError
from axon_nb.records.protocol.messages import RankCall, cell_source
from axon_nb.records.protocol.transfer import BroadcastModels, DescribeModels, Seed, SyncRecord
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes

if TYPE_CHECKING:
    from axon_nb.cluster.cells.manager import CellManager

_ALTERNATIVE = "load a checkpoint on all ranks, or rebuild it"
_MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What `Cluster.sync` copied, and what it could not copy; prints as sentences."""

    source: int
    """The rank that the variables were copied from."""
    copied: tuple[str, ...]
    """Names of the copied variables."""
    size: int
    """Bytes of the copied modules."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """By name of each variable that was not copied, the reason; reads after the name."""

    def __str__(self) -> str:
        names = ", ".join(f"`{name}`" for name in self.copied)
        lines = [f"Copied {names} from rank {self.source} to all ranks ({format_bytes(self.size)} of weights)."]
        lines += [f"Not copied: `{name}` {reason}: {_ALTERNATIVE}." for name, reason in self.skipped.items()]
        return "\n".join(lines)

    __repr__ = __str__


def plan_sync(
    reports: Mapping[int, Mapping[str, SyncRecord]], source: int, names: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Decide which variables to copy, in order, and why the others cannot be copied.

    Args:
        reports: The variables of each rank, by rank and name.
        source: The rank to copy from.
        names: What the user named; empty: everything on rank `source`.

    Raises:
        UsageError: a named variable cannot be copied, or there is nothing to copy.
    """
    skipped = {name: reason for name in names or reports[source] if (reason := _why_not(reports, source, name))}
    if names and skipped:
        name, reason = next(iter(skipped.items()))
        raise UsageError(
            f"`{name}` {reason}: {_ALTERNATIVE}. `%distributed sync` copies only what every rank holds in full."
        )
    possible = [name for name in reports[source] if name not in skipped]
    selection = [
        name for name in possible if not all(reports[rank][name].contained_in in possible for rank in reports)
    ]  # the others come with the variable that contains them
    if not selection:
        more = "".join(f" `{name}` {reason}." for name, reason in skipped.items())
        raise UsageError(f"Rank {source} has no module, optimizer or scheduler that can be copied.{more}")
    return selection, {
        name: reason for name, reason in skipped.items() if reports[source][name].contained_in not in skipped
    }


def _why_not(reports: Mapping[int, Mapping[str, SyncRecord]], source: int, name: str) -> str:
    absent = [rank for rank in reports if name not in reports[rank]]
    if absent:
        return f"does not exist on {name_ranks(absent)}"
    entries = {rank: report[name] for rank, report in reports.items()}
    reasons = [entry.obstacle for entry in entries.values() if entry.obstacle]
    if reasons:
        return reasons[0]
    reference = entries[source]
    different = [
        rank for rank, entry in entries.items() if (entry.kind, entry.digest) != (reference.kind, reference.digest)
    ]
    return f"has different types or shapes on {name_ranks(different)}" if different else ""


def sync(cells: CellManager, source: int, names: Sequence[str]) -> SyncReport:
    """Copy one rank's models, optimizers and schedulers to all others; see `Cluster.sync`."""
    if source not in cells.state.ranks:
        raise UsageError(f"--from {source}: ranks are 0 to {cells.state.world_size - 1}.")
    if busy := cells.state.busy:
        raise UsageError(f"A cell is running on {name_ranks(busy)}: wait until it finishes, or interrupt it.")
    reports: Mapping[int, Mapping[str, SyncRecord]] = _call(cells, DescribeModels(tuple(names)))
    selection, skipped = plan_sync(reports, source, names)
    _call(cells, BroadcastModels(source, tuple(selection)))
    size = sum(reports[source][name].bytes for name in selection if reports[source][name].kind == "module")
    return SyncReport(source, tuple(selection), size, skipped)


def _call(cells: CellManager, call: RankCall[Any]) -> Mapping[int, Any]:
    # It runs as a cell, so that a death, an interrupt or a failure aborts it like any other cell.
    return cells.run(cell_source(call), quiet=True).values


def seed(cells: CellManager, value: int, *, per_rank: bool = False) -> str:
    """Seed `random`, NumPy and torch (every device) on all ranks; return a sentence that says so.

    Args:
        cells: The cells of the cluster.
        value: The seed.
        per_rank: Whether each rank's seed is `value` plus its rank.

    Raises:
        UsageError: torch does not accept the seed.
    """
    highest = _MAX_SEED - cells.state.world_size
    if not 0 <= value <= highest:
        raise UsageError(f"seed must be an integer from 0 to {highest}; got {value}.")
    cells.run(cell_source(Seed(value, per_rank)), quiet=True)
    done = f"Seeded random, numpy and torch on {name_ranks(cells.state.ranks)}"
    if per_rank:
        return f"{done}: {value} on rank 0, {value + 1} on rank 1, and so on."
    return f"{done} with {value}."
