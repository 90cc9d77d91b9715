"""The record of a planned program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from axon_nb.plan.program.clock import LaneTimes
from axon_nb.plan.program.figure import figure_of_program
from axon_nb.plan.tables import format_ms, html_table, text_table, unit_for
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.spans import Span
from axon_nb.records.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

_MAX_LINES, _MAX_KINDS = 12, 16
_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


@dataclass(frozen=True)
class CallCount:
    """Equal collectives or messages of one step."""

    operation: str
    num_ranks: int
    """Of the group."""
    calls: int
    bytes: int
    """Of whole tensors: an all_gather's output, a reduce_scatter's input."""


@dataclass(frozen=True)
class PlannedRanks:
    """Ranks that do the same work, in the numbers of one of them."""

    rank: int
    """The one that ran."""
    ranks: tuple[int, ...]
    """Those that it stands for, itself included."""
    peak_bytes: int
    """The highest sum of all storages."""
    peak_at: str
    """The line that reached it."""
    memory: Mapping[str, int]
    """Bytes that were held at the peak, by the line that allocated them; the largest first."""
    out_of_memory_at: str | None
    """The line that allocates past the limit; None: none does."""
    calls: tuple[CallCount, ...]
    """Of the last step."""
    parts: Mapping[str, float]
    """Seconds of the last step by part; they add up to the step."""
    total_s: float
    """Seconds of the whole program."""
    flops: float
    """Of the whole program."""
    num_steps: int
    """Steps of the first optimizer."""
    spans: tuple[Span, ...] = field(repr=False)
    """Times in nanoseconds since the start of the program."""

    @property
    def step_s(self) -> float:
        """Seconds of the last step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class ProgramPlan:
    """A program's memory, communication and time on ranks that do not exist; made by `axon_nb.plan.run`."""

    name: str
    """Of the function, or of the cell."""
    world_size: int
    device: str
    """The card's name, or ``cpu``."""
    memory_limit: float | None
    """Bytes per rank; None: unlimited."""
    ranks: tuple[PlannedRanks, ...]
    """One entry per kind of rank."""
    notes: tuple[str, ...] = ()
    """Assumptions behind the numbers."""
    has_times: bool = True
    """Whether rates were given; if not, all times are 0."""

    @property
    def worst(self) -> PlannedRanks:
        """The ranks with the highest peak."""
        return max(self.ranks, key=lambda one: one.peak_bytes)

    @property
    def slowest(self) -> PlannedRanks:
        """The ranks with the longest step; of equal ones, those that compute longest."""
        return max(self.ranks, key=lambda one: (round(one.step_s, 9), one.parts["compute"]))

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all ranks, in bytes."""
        return self.worst.peak_bytes

    @property
    def step_s(self) -> float:
        """Seconds of the last step: from one end of the first optimizer's step to the next."""
        return self.slowest.step_s

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds of the slowest ranks' step by part."""
        return self.slowest.parts

    @property
    def out_of_memory(self) -> str | None:
        """A sentence about the line that allocates past the memory; None: the program fits."""
        over = next((one for one in self.ranks if one.out_of_memory_at is not None), None)
        if over is None or self.memory_limit is None:
            return None
        who = f"rank{'s' if len(over.ranks) > 1 else ''} {format_ranks(over.ranks)}"
        return (
            f"Out of memory on {who}: {over.out_of_memory_at} allocates past {format_bytes(round(self.memory_limit))}; "
            f"the program needs {format_bytes(over.peak_bytes)}."
        )

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of one rank of each kind; `axon_nb.show.timeline` shows them."""
        return tuple(span for one in self.ranks for span in one.spans)

    def rank(self, rank: int) -> PlannedRanks:
        """Return the numbers of a rank."""
        return next(one for one in self.ranks if rank in one.ranks)

    def figure(self) -> Any:
        """A plotly figure: per kind of rank, the memory at its peak by line, and its step by part."""
        shown = sorted(self.ranks, key=lambda one: one.peak_bytes, reverse=True)[:_MAX_KINDS]
        shown.sort(key=lambda one: one.rank)
        return figure_of_program(
            self.title,
            [name_ranks(one.ranks) for one in shown],
            [one.memory for one in shown],
            [one.parts for one in shown] if self.has_times else [],
            self.memory_limit if self.out_of_memory else None,
        )

    def to_frame(self, by: str = "memory") -> pd.DataFrame:
        """Return a table.

        Args:
            by: ``memory``: one row per kind of rank and line (rank, line, gib); ``calls``: per kind of rank, operation
                and size of group (rank, operation, num_ranks, calls, mib); ``time``: per kind of rank and part (rank,
                part, ms).

        Raises:
            KeyError: it is none of these.
        """
        import pandas as pd

        tables: dict[str, tuple[list[str], list[tuple[Any, ...]]]] = {
            "memory": (
                ["rank", "line", "gib"],
                [(one.rank, line, size / 2**30) for one in self.ranks for line, size in one.memory.items()],
            ),
            "calls": (
                ["rank", "operation", "num_ranks", "calls", "mib"],
                [
                    (one.rank, row.operation, row.num_ranks, row.calls, row.bytes / 2**20)
                    for one in self.ranks
                    for row in one.calls
                ],
            ),
            "time": (
                ["rank", "part", "ms"],
                [(one.rank, part, 1e3 * seconds) for one in self.ranks for part, seconds in one.parts.items()],
            ),
        }
        columns, rows = tables[by]
        return pd.DataFrame(rows, columns=columns)

    @property
    def title(self) -> str:
        """Text such as ``train on 64 ranks of h100``."""
        return f"{self.name} on {self.world_size} rank{'s' if self.world_size > 1 else ''} of {self.device}"

    def _summary(self) -> str:
        head = f"{self.title}: "
        time = f"{format_ms(self.step_s)} ms per step, " if self.has_times else ""
        return f"{head}{time}{format_bytes(self.peak_bytes)} at the peak of rank {self.worst.rank}"

    def _tables(self) -> Iterator[_Table]:
        worst, slowest = self.worst, self.slowest
        unit = unit_for(worst.memory.values())
        held = list(worst.memory.items())
        lines: list[tuple[str, ...]] = [(line, unit.text(size)) for line, size in held[:_MAX_LINES]]
        if rest := sum(size for _, size in held[_MAX_LINES:]):
            lines.append(("other lines", unit.text(rest)))
        yield f"Held at the peak of rank {worst.rank}, {worst.peak_at}", ("allocated by", unit.name), lines
        if slowest.calls:
            rows: list[tuple[str, ...]] = [
                (one.operation, str(one.num_ranks), str(one.calls), format_bytes(one.bytes)) for one in slowest.calls
            ]
            yield f"A step of rank {slowest.rank} sends", ("operation", "ranks", "calls", "bytes"), rows
        if self.has_times:
            total = self.step_s or 1.0
            rows = [(part, format_ms(s), f"{s / total:.1%}") for part, s in self.parts.items()]
            yield f"A step of rank {slowest.rank} takes", ("part", "ms", "share"), rows

    def __str__(self) -> str:
        first = [self._summary(), *([self.out_of_memory] if self.out_of_memory else [])]
        tables = [text_table(*table) for table in self._tables()]
        return "\n".join([*first, *tables, *(f"- {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        first = html_table(self._summary(), (), [], [self.out_of_memory] if self.out_of_memory else [])
        *tables, (title, head, rows) = self._tables()
        html = [first, *(html_table(*table) for table in tables), html_table(title, head, rows, self.notes)]
        return {"text/plain": str(self), "text/html": "".join(html)}


def planned_ranks(times: LaneTimes, limit: float | None) -> PlannedRanks:
    """Summarize what one lane did.

    Args:
        times: The times from the clock.
        limit: Bytes of memory; None: unlimited.
    """
    record = times.lane.record
    by_line: Counter[str] = Counter()
    for place, size in record.by_place.items():
        by_line[record.places[place].text] += size
    parts, window = times.step
    counted: dict[tuple[str, int], list[int]] = {}
    for call in record.calls[window]:
        entry = counted.setdefault((call.name, len(record.groups[call.group])), [0, 0])
        entry[0] += 1
        entry[1] += call.bytes
    over = record.over_place
    return PlannedRanks(
        record.rank,
        times.lane.ranks,
        record.peak_bytes,
        record.places[record.peak_place].text if record.places else "",
        dict(by_line.most_common()),
        None if over is None or limit is None else record.places[over].text,
        tuple(CallCount(*key, *value) for key, value in counted.items()),
        parts,
        times.total_s,
        record.flops,
        record.num_steps,
        tuple(times.spans),
    )
