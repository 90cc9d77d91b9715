"""The record of a step's communication: planned, or recorded in a real step and counted as plans count it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from axon_nb.plan.display import Shown, Table, bar, format_ms, plotly_figure, titled, unit_for
from axon_nb.plan.hardware import Link, rounds_and_volume
from axon_nb.records.spans import Span
from axon_nb.records.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

GRADIENT_AXES = ("replicate", "dp", "shard", "ep", "cp")
"""Axes along which ranks have different samples, or positions of a sequence, and average their gradients."""
_HEAD = ("axis", "ranks", "collective", "phase", "purpose", "calls", "bytes", "sent per rank", "time, ms")
_MIB = 1024.0 * 1024.0
_NAMES = {
    "all_gather": (
        "_allgather_base", "all_gather_single", "all_gather_single_coalesced", "allgather", "allgather_coalesced",
        "allgather_into_tensor_coalesced",
    ),
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_to_all": ("all_to_all_single", "alltoall", "alltoall_base"),
    "barrier": ("barrier",),
    "broadcast": ("broadcast",),
    "recv": ("recv",),
    "reduce_scatter": (
        "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
    ),
    "send": ("send",),
}  # fmt: skip
"""torch's names of each operation, which differ between versions."""
OPERATIONS = {name: kind for kind, names in _NAMES.items() for name in names}
"""By torch's name: the operation."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls of one kind that a rank makes in a step."""

    axis: str
    """The mesh axis, or those of a group along several: ``dp+cp``."""
    num_ranks: int
    """Ranks along it."""
    operation: str
    """``all_reduce``, ``all_gather``, ``all_to_all``, ``reduce_scatter``, ``broadcast``, ``send``, ``recv`` or
    ``barrier``."""
    phase: str
    """``forward``, ``backward`` or ``optimizer``."""
    purpose: str
    """What the calls are for, as text."""
    messages: tuple[tuple[int, int], ...]
    """(bytes, calls). Bytes are those of the whole tensor: an all_gather's output, a reduce_scatter's input."""
    overlaps_with: str = ""
    """The phase whose computation overlaps with the calls; empty: none."""
    pp_rank: int = 0
    """The rank along ``pp`` that makes the calls; 0 without a pipeline."""
    seconds: float | None = None
    """Seconds if the calls run one after the other; None: no link is known. Receives take 0 s: `send` includes their
    time."""

    @property
    def calls(self) -> int:
        """Number of calls."""
        return sum(count for _, count in self.messages)

    @property
    def bytes(self) -> int:
        """Bytes of all calls together."""
        return sum(size * count for size, count in self.messages)

    @property
    def once(self) -> bool:
        """Whether a step that accumulates several batches makes the calls once: they average or reduce gradients."""
        return self.averages and self.operation in ("all_reduce", "reduce_scatter", "broadcast")

    @property
    def averages(self) -> bool:
        """Whether the ranks average gradients."""
        return set(self.axis.split("+")) <= set(GRADIENT_AXES)

    @property
    def is_within_stage(self) -> bool:
        """Whether layers make the calls, in a pipeline for each microbatch."""
        moves = self.operation in ("all_to_all", "send", "recv")
        return self.axis == "tp" or (moves and self.axis in ("ep", "cp"))

    @property
    def sent_bytes(self) -> int:
        """Bytes that the rank sends if collectives use the ring algorithm."""
        if self.operation == "recv":
            return 0
        _, volume = rounds_and_volume(self.operation, self.num_ranks)
        return round(volume * self.bytes)

    def timed(self, link: Link | None) -> Traffic:
        """The same, with its time on a link."""
        if link is None:
            return self
        seconds = 0.0
        if self.operation != "recv":
            seconds = sum(count * link.seconds(self.operation, size, self.num_ranks) for size, count in self.messages)
        return replace(self, seconds=seconds)


@dataclass(frozen=True, repr=False)
class CommunicationPlan(Shown):
    """Communication of a training step; made by `axon_nb.plan.communication`."""

    title: str
    """Model and layout, as text."""
    mesh: Mapping[str, int]
    """Ranks per axis."""
    rows: tuple[Traffic, ...]
    """By rank along ``pp``; ranks that differ only along other axes do the same."""
    links: Mapping[str, Link]
    """By axis; empty: times were not requested."""
    notes: tuple[str, ...] = ()
    """Assumptions behind the numbers."""

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Ranks along ``pp``."""
        return tuple(range(self.mesh.get("pp", 1)))

    def select(
        self,
        *,
        axis: str | None = None,
        operation: str | None = None,
        phase: str | None = None,
        pp_rank: int | None = None,
    ) -> tuple[Traffic, ...]:
        """Filter the rows.

        Args:
            axis: Only this axis.
            operation: Only this operation.
            phase: Only this phase.
            pp_rank: Only this rank along ``pp``.
        """
        wanted = {"axis": axis, "operation": operation, "phase": phase}
        filters = {name: value for name, value in wanted.items() if value is not None}
        rows = self.rows if pp_rank is None else self._by_pp_rank.get(pp_rank, ())
        return tuple(row for row in rows if all(getattr(row, name) == value for name, value in filters.items()))

    @cached_property
    def _by_pp_rank(self) -> dict[int, list[Traffic]]:
        rows: dict[int, list[Traffic]] = {}
        for row in self.rows:
            rows.setdefault(row.pp_rank, []).append(row)
        return rows

    def calls(self, axis: str | None = None, operation: str | None = None, *, pp_rank: int = 0) -> int:
        """Number of calls of one rank in a step."""
        return sum(row.calls for row in self.select(axis=axis, operation=operation, pp_rank=pp_rank))

    def bytes(self, axis: str | None = None, operation: str | None = None, *, pp_rank: int = 0) -> int:
        """Bytes of one rank's calls in a step, counting whole tensors."""
        return sum(row.bytes for row in self.select(axis=axis, operation=operation, pp_rank=pp_rank))

    def seconds(self, axis: str | None = None, *, pp_rank: int = 0) -> float:
        """Seconds of one rank's calls, one after the other."""
        return sum(row.seconds or 0.0 for row in self.select(axis=axis, pp_rank=pp_rank))

    def by_operation(self, *, pp_rank: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
        """(calls, bytes) of one rank, by axis and operation."""
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for row in self.select(pp_rank=pp_rank):
            calls, size = totals.get((row.axis, row.operation), (0, 0))
            totals[row.axis, row.operation] = calls + row.calls, size + row.bytes
        return totals

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of call: pp_rank, axis, num_ranks, operation, phase, purpose, calls, mib, sent_mib, ms."""
        import pandas as pd

        return pd.DataFrame(
            {
                "pp_rank": [row.pp_rank for row in self.rows],
                "axis": [row.axis for row in self.rows],
                "num_ranks": [row.num_ranks for row in self.rows],
                "operation": [row.operation for row in self.rows],
                "phase": [row.phase for row in self.rows],
                "purpose": [row.purpose for row in self.rows],
                "calls": [row.calls for row in self.rows],
                "mib": [row.bytes / _MIB for row in self.rows],
                "sent_mib": [row.sent_bytes / _MIB for row in self.rows],
                "ms": [None if row.seconds is None else 1e3 * row.seconds for row in self.rows],
            }
        )

    def figure(self) -> Any:
        """A plotly figure: bytes that a rank sends by axis and phase, or milliseconds if links are known."""
        timed = bool(self.links)
        sent = unit_for(sum(row.sent_bytes for row in self.select(pp_rank=pp_rank)) for pp_rank in self.pp_ranks)
        value: Callable[[Traffic], float] = (
            (lambda row: 1e3 * (row.seconds or 0.0)) if timed else (lambda row: sent.of(row.sent_bytes))
        )
        busiest = max(
            self.pp_ranks, key=lambda pp_rank: sum(value(row) for row in self.select(pp_rank=pp_rank)), default=0
        )
        rows = [row for row in self.select(pp_rank=busiest) if row.operation != "recv"]
        bars = [
            bar(
                operation,
                [f"{row.axis}, {row.phase}" for row in own],
                [value(row) for row in own],
                customdata=[row.purpose for row in own],
                hovertemplate="%{customdata}<br>%{y:.4g}",
            )
            for operation in dict.fromkeys(row.operation for row in rows)
            for own in [[row for row in rows if row.operation == operation]]
        ]
        unit = "ms" if timed else f"{sent.name} sent per rank"
        return plotly_figure(bars, titled(self.title, barmode="stack", yaxis=titled(unit)))

    def _summary(self) -> str:
        parts = []
        for pp_rank in self.pp_ranks:
            rows = self.select(pp_rank=pp_rank)
            sent = format_bytes(sum(row.sent_bytes for row in rows))
            who = f"pp rank {pp_rank}" if len(self.pp_ranks) > 1 else "each rank"
            time = f" in {format_ms(self.seconds(pp_rank=pp_rank))} ms" if self.links else ""
            parts.append(f"{who} makes {sum(row.calls for row in rows)} calls and sends {sent}{time}")
        shown = parts if len(parts) <= 4 else [*parts[:3], f"… {len(parts) - 4} more", parts[-1]]
        return f"{self.title}. Per step, {'; '.join(shown)}"

    def _table(self) -> Table:
        rows = [
            (
                row.axis,
                str(row.num_ranks),
                row.operation,
                row.phase,
                row.purpose + (f" (pp rank {row.pp_rank})" if len(self.pp_ranks) > 1 else ""),
                str(row.calls),
                format_bytes(row.bytes),
                format_bytes(row.sent_bytes),
                "" if row.seconds is None else format_ms(row.seconds),
            )
            for row in self.rows
        ]
        links = [f"{axis}: {link}" for axis, link in self.links.items() if self.mesh.get(axis, 1) > 1]
        return self._summary(), _HEAD, rows, [*self.notes, *links]


def grouped(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Group message sizes as (bytes, count), in order of first occurrence."""
    counts: dict[int, int] = {}
    for size in sizes:
        counts[size] = counts.get(size, 0) + 1
    return tuple(counts.items())


def recorded_communication(spans: Iterable[Span], mesh: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Count calls and bytes by axis and operation, to compare with `CommunicationPlan.by_operation`.

        before = trace.ring.position
        step()
        recorded_communication(trace.ring.since(before)[0], mesh)

    `%%distributed` cells record every operation of every group.

    Args:
        spans: This rank's spans of one step.
        mesh: A mesh with named axes; spans of other groups are ignored.

    Returns:
        (calls, bytes) by axis and operation; bytes of whole tensors.
    """
    axes = {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or ()}
    return count_calls(((span.group, span.name, span.bytes) for span in spans if span.kind != "wait"), axes)


def count_calls(
    calls: Iterable[tuple[str, str, int]], axes: Mapping[str, str]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Count the same from (group, torch's operation name, bytes of the whole tensor).

    Args:
        calls: The calls in any order; those that do not communicate are ignored.
        axes: Axis by group name.
    """
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for group, name, size in calls:
        if group not in axes or name not in OPERATIONS:
            continue
        key = axes[group], OPERATIONS[name]
        before, total = totals.get(key, (0, 0))
        totals[key] = before + 1, total + size
    return totals
