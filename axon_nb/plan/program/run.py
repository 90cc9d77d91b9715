"""`plan.run`: the user's own program, or a notebook cell, on ranks that do not exist; and its plan."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

from axon_nb.errors import UsageError
from axon_nb.plan.arguments import check_callbacks, check_int, check_number
from axon_nb.plan.display import bar, format_flops, format_ms, html_table, plotly_figure, text_table, titled, unit_for
from axon_nb.plan.errors import PlanError
from axon_nb.plan.hardware import CARDS, Link, Rates, link_between, resolve_links, resolve_rates
from axon_nb.plan.process import Report, run_in_process
from axon_nb.plan.program.clock import COMMUNICATION, COMPUTE, LAUNCHES, OTHERS, LaneTimes, play
from axon_nb.plan.program.record import Lane
from axon_nb.records.colors import KINDS, LIMIT
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.spans import Span
from axon_nb.records.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

_GIB = 1024**3
_CPU = "cpu"
_MAX_LINES, _MAX_KINDS = 12, 16
_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
_MAX_FIGURE_LINES = 8
_PAINTS = {
    COMPUTE: KINDS["forward"].both,
    COMMUNICATION: KINDS["collective"].both,
    OTHERS: KINDS["wait"].both,
    LAUNCHES: KINDS["other"].both,
}


def run(
    function: Callable[..., Any],
    world_size: int,
    *,
    device: str = "h100",
    args: Sequence[Any] = (),
    memory: float | None = None,
    rates: Rates | float | str | Any = None,
    links: Link | str | Any = None,
    overlap: float | None = None,
    ranks: str | Sequence[int] = "distinct",
    item: float | None = None,
    name: str | None = None,
    progress: Callable[[float, str], None] | None = None,
    cancel: threading.Event | None = None,
) -> ProgramPlan:
    """Run a program on ranks that do not exist: peak memory by line, collectives, and the time of a step.

        def train():
            model = DistributedDataParallel(Net().cuda())
            ...

        planned = plan.run(train, world_size=64, device="h100")
        planned.out_of_memory       # None, or the line that allocates past the card's memory

    A separate process runs the program on tensors without data, once for each kind of rank; nothing of it is left
    here, and what it prints is lost. It may do what programs for torchrun do: make groups and meshes, wrap models by
    DDP, `fully_shard` or `parallelize_module`, call collectives by hand. A virtual clock plays all ranks together:
    operations at the card's rates, calls on its links, in the order and on the streams that the program uses. CUDA's
    streams and events, including those of FSDP2, count; `torch.compile` is ignored.

    Args:
        function: The program; called with `args` on each rank, after `init_process_group`.
        world_size: Number of ranks.
        device: A GPU's name, such as ``"h100"``: its memory, rates and links are the defaults, its hosts hold 8. Or
            ``"cpu"``: CPU ranks with Gloo, without limits and rates.
        args: Arguments of the program.
        memory: GiB per rank; None: the card's.
        rates: The same as in `step_time`; None: the card's.
        links: One link for all groups: a `Link`, a preset's name, or the result of `calibrate`; None: the card's.
        overlap: Fraction of communication, 0 to 1, that computation beside it hides; None: as `calibrate` measured, or
            1.
        ranks: ``distinct``: one rank of each kind. The first three ranks and the last one along each axis of
            the program's groups run, and where they differ, ranks between them. ``all``; or rank numbers, the first of
            which stands for all others.
        item: What tensors answer to `.item()`, `float()` and `bool()`; None: this is an error, because there is no
            value.
        name: The name of the program in the result; None: the function's.
        progress: Called with the fraction done, 0 to 1, and the next step.
        cancel: Set it to cancel the plan.

    Raises:
        PlanError: the program failed, hangs, or reads a tensor's value; the message names ranks and lines.
        SimulatorError: the simulator process failed.
        PlanCancelledError: `cancel` was set.
        UsageError: an option is invalid; the message says what works.
    """
    check_callbacks(progress, cancel)
    if not callable(function):
        raise UsageError(f"plan.run needs a function that trains, such as `train`; got {type(function).__name__}.")
    size = check_int("world_size", world_size)
    card = CARDS.get(device.lower())
    if card is None and device.lower() != _CPU:
        raise UsageError(f"device must be one of {', '.join(CARDS)}, or cpu; got {device!r}.")
    speed = resolve_rates(rates) if rates is not None else None if card is None else card.rates
    limit = card.gib if memory is None and card is not None else memory
    if limit is not None:
        limit = _GIB * check_number("memory", limit, rule="GiB per rank, such as 80", least=1e-9)
    task = {
        "function": _pickled(function, args),
        "world_size": size,
        "is_gpu": card is not None,
        "ranks_per_host": size if card is None else card.gpus_per_host,
        "rates": speed,
        "memory": limit,
        "item": None if item is None else float(item),
        "ranks": _checked_ranks(ranks, size),
    }
    lanes = run_in_process(_simulate, cloudpickle.dumps(task), progress=progress, cancel=cancel)
    link = None if links is None else resolve_links(links, {"all": size})["all"]
    measured = getattr(rates, "overlap", 1.0) if overlap is None else overlap
    times = _played(
        lanes,
        lambda group: link if link is not None or card is None else link_between(card, group),
        issue_s=0.0 if speed is None else speed.issue_s,
        overlap=check_number("overlap", measured, rule="a fraction, 0 to 1", most=1.0),
        is_complete=isinstance(task["ranks"], str),
    )
    planned = tuple(planned_ranks(one, limit) for one in times)
    title = name or str(getattr(function, "__name__", "program"))
    notes = _notes(lanes, speed, ranks, [one.stuck_at for one in times])
    return ProgramPlan(title, size, device.lower(), limit, planned, tuple(notes), speed is not None)


def _played(lanes: Sequence[Lane], *args: Any, **options: Any) -> list[LaneTimes]:
    try:
        return play(lanes, *args, **options)
    except PlanError as error:
        if len(lanes) == sum(len(lane.ranks) for lane in lanes):
            raise
        raise PlanError(f"{error} One rank of each kind ran; ranks='all' runs each.") from error


def _pickled(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        return bytes(cloudpickle.dumps((function, tuple(args))))
    except Exception as error:
        raise PlanError(
            f"The program cannot be sent to another process ({error}): have it make what it needs instead of using "
            "open objects of the notebook."
        ) from error


def _checked_ranks(ranks: Any, size: int) -> str | tuple[int, ...]:
    if isinstance(ranks, str) and ranks in ("distinct", "all"):
        return ranks
    if isinstance(ranks, Sequence) and not isinstance(ranks, str) and ranks:
        numbers = tuple(check_int("ranks", rank, least=0) for rank in ranks)
        if max(numbers) < size:
            return numbers
    raise UsageError(f"ranks must be 'distinct', 'all' or numbers of the {size} ranks, such as [0, 1]; got {ranks!r}.")


def _notes(lanes: Sequence[Lane], rates: Rates | None, ranks: Any, stuck: Sequence[Any]) -> list[str]:
    notes = []
    if rates is not None:
        notes.append(f"Rates: {rates.source}. The clock is virtual; kernels of equal size take equally long.")
        if "float32" in rates.products and any("float32" in lane.record.dtypes for lane in lanes):
            notes.append(
                f"Products in float32 run at {format_flops(rates.products['float32'])}, because the program does not "
                "allow TF32: torch.set_float32_matmul_precision('high') does."
            )
    if ranks != "all" and len(lanes) < sum(len(lane.ranks) for lane in lanes):
        kinds = "; ".join(f"rank {lane.record.rank} stands for {format_ranks(lane.ranks)}" for lane in lanes[:4])
        more = f", and {len(lanes) - 4} more" if len(lanes) > 4 else ""
        notes.append(f"Ranks that do the same ran once: {kinds}{more}; ranks='all' runs each.")
    if lanes and all(lane.record.num_steps < 2 for lane in lanes):
        notes.append("The program takes fewer than two optimizer steps, so its step includes what is done before it.")
    for lane, place in zip(lanes, stuck, strict=True):
        if place is not None:
            notes.append(
                f"Rank {lane.record.rank} waits in line {place.line} for a call that none of the ranks that ran makes."
            )
    return notes


def _simulate(task: Mapping[str, Any], report: Report) -> list[Lane]:
    """Run the ranks, in the process that may import torch."""
    from axon_nb.plan.program.rank import simulate

    return simulate(task, report)


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
    record, peak = times.lane.record, times.lane.record.peak
    by_line: Counter[str] = Counter()
    for place, size in peak.by_place.items():
        by_line[record.places[place].text] += size
    parts, window = times.step
    counted: dict[tuple[str, int], list[int]] = {}
    for call in record.calls[window]:
        entry = counted.setdefault((call.name, len(record.groups[call.group])), [0, 0])
        entry[0] += 1
        entry[1] += call.bytes
    return PlannedRanks(
        record.rank,
        times.lane.ranks,
        peak.bytes,
        record.places[peak.place].text if record.places else "",
        dict(by_line.most_common()),
        None if peak.over is None or limit is None else record.places[peak.over].text,
        tuple(CallCount(*key, *value) for key, value in counted.items()),
        parts,
        times.total_s,
        record.flops,
        record.num_steps,
        tuple(times.spans),
    )


def figure_of_program(
    title: str,
    names: Sequence[str],
    memory: Sequence[Mapping[str, int]],
    parts: Sequence[Mapping[str, float]],
    limit: float | None,
) -> Any:
    """Return stacked bars per kind of rank: what is held at its peak, by line; and beside it its step, by part.

    Args:
        title: Of the figure.
        names: Of the kinds of ranks.
        memory: Bytes by line, of each kind.
        parts: Seconds by part, of each kind; empty: times are unknown.
        limit: Bytes of memory that is drawn as a line; None: no line.
    """
    unit = unit_for(sum(held.values()) for held in memory)
    right = 0.55 if parts else 1.0
    layout = titled(
        title,
        barmode="stack",
        legend={"traceorder": "normal"},
        xaxis={"domain": [0.0, right], "type": "category"},
        yaxis=titled(f"{unit.name} at the peak"),
    )
    if limit is not None:
        height = unit.of(round(limit))
        ends = {"x0": 0, "x1": right, "xref": "paper", "y0": height, "y1": height}
        layout["shapes"] = [{"type": "line", **ends, "line": {"color": LIMIT.both, "dash": "dash"}}]
    bars = [bar(line, names, [unit.of(size) for size in sizes]) for line, sizes in _by_line(memory).items()]
    if parts:
        layout["xaxis2"] = {"domain": [0.68, 1.0], "anchor": "y2", "type": "category"}
        layout["yaxis2"] = titled("ms per step", anchor="x2")
        bars += [
            bar(part, names, [1e3 * spent[part] for spent in parts], paint, xaxis="x2", yaxis="y2")
            for part, paint in _PAINTS.items()
            if any(spent[part] for spent in parts)
        ]
    return plotly_figure(bars, layout)


def _by_line(memory: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Bytes of each kind of rank by line, the largest first; lines that hold little together."""
    largest: Counter[str] = Counter()
    for held in memory:
        for line, size in held.items():
            largest[line] = max(largest[line], size)
    rows = {line: [held.get(line, 0) for held in memory] for line, _ in largest.most_common(_MAX_FIGURE_LINES)}
    if len(largest) > _MAX_FIGURE_LINES:
        rows["other lines"] = [sum(size for line, size in held.items() if line not in rows) for held in memory]
    return rows
