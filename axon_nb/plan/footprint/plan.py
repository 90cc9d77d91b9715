"""A memory plan: what is asked, and the bytes on each rank, by purpose, between steps and at the peak.

Needs no torch. The plan's text, HTML and figure use the unit that suits the largest number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from axon_nb.plan.arguments import UNSHARDED, check_callable, check_choice, check_int, check_number
from axon_nb.plan.display import bar, html_table, paint_of, plotly_figure, text_table, titled, unit_for
from axon_nb.plan.errors import PlanError
from axon_nb.plan.models import check_model, dtype_name

if TYPE_CHECKING:
    import pandas as pd

OFFLOADED: dict[str, tuple[str, ...]] = {
    "none": (),
    "params": ("parameters",),
    "optimizer_states": ("optimizer",),
    "full": ("parameters", "gradients", "optimizer"),
}
"""The parts that each kind of offloading keeps in host memory."""
_DEVICES = ("cpu", "cuda")
GIB = 1024**3
MODEL_STATES_ONLY = "model states only"
"""The `method` of a closed-form plan, which has no activations and no buffers."""
_MAX_RANKS = 16
_ERROR = 0.04
"""Largest relative error against real ranks; tests/plan/footprint/test_real_ranks.py checks it."""
_LABELS = {
    "optimizer": "optimizer states",
    "unsharded": "unsharded buffers",
    "communication": "communication buffers",
    "fragmentation": "fragmentation allowance",
}


@dataclass(frozen=True)
class MemoryRequest:
    """One request to the simulator; fields as in `plan.memory`."""

    model: Any
    mesh: Mapping[str, int]
    """Size of each axis; the last one varies fastest."""
    strategy: str
    inputs: Any = None
    target: Any = None
    loss: Any = None
    optimizer: Any = "AdamW"
    """A name in `torch.optim`, a class, or a function that makes one from parameters."""
    optimizer_options: Mapping[str, Any] | None = None
    dtype: str | None = None
    mixed_precision: str | None = None
    cpu_offload: str = "none"
    batch: int = 1
    seq: int | None = None
    activation_checkpointing: Any = None
    wrap: Any = None
    keep_whole: bool = False
    tp_plan: Any = "auto"
    num_microbatches: int | None = None
    schedule: str = "1F1B"
    device: str = "cuda"
    ranks: str | tuple[int, ...] = "worst"
    fragmentation: float = 0.0
    extrapolate: bool = True
    simulate: bool = True

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def is_unwrapped(self) -> bool:
        """Whether nothing is wrapped around the model: layers are sharded, and tp is the only axis."""
        return self.mesh.keys() == {"tp"}

    def size(self, *axes: str) -> int:
        """Product of the sizes of these axes; a missing axis counts as 1."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    @property
    def num_sharers(self) -> int:
        """Ranks over which gradients are averaged: with other samples, or other positions of a sequence."""
        return self.size("dp", "ep", "cp")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis."""
        place = {}
        for axis, size in reversed(list(self.mesh.items())):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.mesh}

    def check(self) -> MemoryRequest:
        """Check all that needs no torch, and return this request.

        Raises:
            PlanError: an option is invalid.
        """
        check_model(self.model)
        for name in ("dtype", "mixed_precision"):
            if (value := getattr(self, name)) is not None:
                dtype_name(value, name)
        check_choice("cpu_offload", self.cpu_offload, tuple(OFFLOADED))
        check_choice("device", self.device, _DEVICES)
        for name in ("batch", "seq", "num_microbatches"):
            if (value := getattr(self, name)) is not None or name == "batch":
                check_int(name, value)
        check_number("fragmentation", self.fragmentation, rule="a fraction of everything else, such as 0.05", most=1.0)
        check_callable("loss", self.loss, "of the output (and the target, if there is one) to a scalar")
        if self.optimizer_options is not None and not isinstance(self.optimizer_options, Mapping):
            raise PlanError(
                f"optimizer_options must be keyword arguments, such as {{'lr': 1e-3}}; got {self.optimizer_options!r}."
            )
        if self.tp_plan != "auto" and not isinstance(self.tp_plan, Mapping):
            raise PlanError(f"tp_plan must be 'auto', or map module name patterns to styles; got {self.tp_plan!r}.")
        numbers = () if isinstance(self.ranks, str) else self.ranks
        outside = [rank for rank in numbers if not 0 <= int(rank) < self.world_size]
        if outside:
            raise PlanError(f"ranks must be 0 to {self.world_size - 1}; got {outside[0]}.")
        self._check_combinations()
        return self

    def _check_combinations(self) -> None:
        """Check options against each other."""
        unsharded = self.strategy in UNSHARDED
        if unsharded and self.cpu_offload in ("params", "full"):
            raise PlanError(
                f"cpu_offload={self.cpu_offload!r} does not work with {self.strategy}, which keeps all parameters on "
                "each device: use full_shard."
            )
        if self.strategy == "ddp" and self.cpu_offload != "none":
            raise PlanError(
                f"cpu_offload={self.cpu_offload!r} does not work with ddp: use optimizer_state or full_shard."
            )
        if self.is_unwrapped and (self.mixed_precision is not None or self.cpu_offload != "none"):
            raise PlanError(
                "mixed_precision and cpu_offload require FSDP: add a dp axis, mesh={'dp': 1, 'tp': …}. To convert the "
                "model, use dtype=."
            )
        is_plain = self.mesh.keys() == {"dp"} and self.cpu_offload == "none" and self.simulate
        if self.keep_whole and (self.strategy != "shard_grad_op" or not is_plain):
            raise PlanError(
                "keep_whole needs strategy='shard_grad_op', dp as the only axis, no cpu_offload, and method='simulate'."
            )
        if self.size("ep") > 1 and self.strategy == "optimizer_state":
            raise PlanError("strategy='optimizer_state' does not work with ep here: use full_shard, or ddp.")
        if self.size("pp") > 1:
            if self.strategy not in ("full_shard", "shard_grad_op") and self.num_sharers > 1:
                raise PlanError(f"strategy={self.strategy!r} does not work with pp: use full_shard or shard_grad_op.")
            if self.cpu_offload != "none":
                raise PlanError(f"cpu_offload={self.cpu_offload!r} does not work with pp: leave it out.")
        elif self.num_microbatches is not None:
            raise PlanError(
                f"num_microbatches={self.num_microbatches} requires a pipeline: add a pp axis, mesh={{'pp': 4, …}}."
            )


def parse_ranks(value: Any) -> str | tuple[int, ...]:
    """Parse which ranks to plan for: ``worst``, ``all``, or rank numbers.

    Raises:
        PlanError: it is none of these.
    """
    if isinstance(value, str):
        return check_choice("ranks", value, ("worst", "all"))
    numbers = list(value) if isinstance(value, Iterable) else [value]
    if not numbers:
        raise PlanError(f"ranks must be 'worst', 'all' or one or more rank numbers; got {value!r}.")
    return tuple(check_int("ranks", number, least=0) for number in numbers)


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one rank at one moment, by purpose."""

    parameters: int = 0
    """The rank's shards between steps."""
    gradients: int = 0
    optimizer: int = 0
    """Optimizer states of the parameters' shapes."""
    activations: int = 0
    """Inputs, tensors that forward saves for backward, their gradients, and temporaries."""
    unsharded: int = 0
    """FSDP's unsharded parameters while a unit computes, and their gradients until they are reduced."""
    communication: int = 0
    """Buffers of collectives: all-gather, reduce-scatter, DDP buckets, and tensors received by pipeline stages."""
    other: int = 0
    """The model's buffers, step counters, and temporaries of the optimizer's step."""
    fragmentation: int = 0
    """Allowance for memory that the allocator cannot use; not a prediction."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def model_states(self) -> int:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    def with_allowance(self, share: float) -> MemoryParts:
        """The same with a fragmentation allowance, a fraction of everything else."""
        bare = replace(self, fragmentation=0)
        return replace(bare, fragmentation=round(share * bare.total))

    def as_dict(self) -> dict[str, int]:
        """Bytes by part."""
        return {part: getattr(self, part) for part in PARTS}


PARTS = tuple(item.name for item in fields(MemoryParts))
"""The parts, in order."""


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Bytes on one rank that belong to one module, without its submodules."""

    name: str
    """Its name in the model as given; empty: the model itself."""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Made by its forward and still alive at the rank's peak."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank."""

    rank: int
    coordinates: Mapping[str, int]
    """Coordinates, by mesh axis."""
    persistent: MemoryParts
    """After the optimizer's step, before gradients are freed."""
    peak: MemoryParts
    """At the step's peak; in closed-form plans the same as `persistent`."""
    phase: str = ""
    """Phase of the peak: forward, backward or optimizer; empty in closed-form plans."""
    module: str = ""
    """The module that runs at the peak, if known."""
    host_bytes: int = 0
    """Bytes that offloading keeps in host memory; on CPU ranks the parts include them."""
    modules: tuple[ModuleMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of a training step on each rank; sizes in bytes, displayed in GiB (1024³ bytes)."""

    model: str
    """Its class."""
    num_parameters: int
    """Of the whole model."""
    mesh: Mapping[str, int]
    strategy: str
    device: str
    method: str
    """``simulated``, with the depths if extrapolated, or ``model states only``."""
    ranks: tuple[RankMemory, ...]
    """The ranks that were requested."""
    model_states: tuple[MemoryParts, ...] = ()
    """Closed-form parameters, gradients and optimizer states of the same ranks."""
    notes: tuple[str, ...] = ()
    """Assumptions behind the numbers."""
    seconds: float = 0.0
    """Seconds that planning took."""
    simulator_bytes: int = 0
    """Peak resident bytes of the simulator process; 0 in closed-form plans."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options, as text."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def worst(self) -> RankMemory:
        """The requested rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak.total)

    @property
    def peak_bytes(self) -> int:
        """The highest peak of the requested ranks, in bytes."""
        return self.worst.peak.total

    @property
    def reserved_bytes(self) -> int:
        """Expected `torch.cuda.max_memory_reserved`: the peak, and gradients that FSDP freed in their own stream."""
        is_alone = self.device != "cuda" or self.strategy in UNSHARDED or self.world_size == 1
        freed = self.worst.persistent.gradients - self.worst.peak.gradients
        return self.peak_bytes + (0 if is_alone else max(freed, 0))

    @property
    def interval_bytes(self) -> tuple[int, int]:
        """The range of bytes in which the highest peak is expected.

        Simulated peaks are within 4 % of those of real ranks on CPUs. Allocators of GPUs may need none or twice the
        fragmentation allowance. Closed-form model states are exact.
        """
        if self.method == MODEL_STATES_ONLY:
            return self.peak_bytes, self.peak_bytes
        peak = self.worst.peak
        bare = peak.total - peak.fragmentation
        return round(bare * (1 - _ERROR)), round(bare * (1 + _ERROR)) + 2 * peak.fragmentation

    def fits(self, memory_gib: float) -> bool:
        """Return whether the highest peak is at most `memory_gib` GiB.

        Raises:
            PlanError: this is a closed-form plan, which has no peak; or `memory_gib` is not a number.
        """
        if self.method == MODEL_STATES_ONLY:
            raise PlanError("This plan has model states only: use memory(…, method='simulate') for the peak.")
        return self.peak_bytes <= check_number("memory_gib", memory_gib, rule="a number of GiB, such as 80") * GIB

    def to_frame(self, by: str = "rank") -> pd.DataFrame:
        """Return a table, sizes in GiB.

        Args:
            by: ``rank``: one row per rank and moment (persistent, peak); ``module``: one row per module of the rank
                with the highest peak.

        Raises:
            PlanError: `by` is neither.
        """
        import pandas as pd

        if by == "module":
            rows: list[dict[str, Any]] = [
                {"module": item.name or "(model)"} | _gib({f.name: getattr(item, f.name) for f in fields(item)[1:]})
                for item in self.worst.modules
            ]
        elif by == "rank":
            rows = [
                {"rank": rank.rank, **rank.coordinates, "moment": moment}
                | _gib(parts.as_dict() | {"total": parts.total, "host": rank.host_bytes})
                for rank in self.ranks
                for moment, parts in (("persistent", rank.persistent), ("peak", rank.peak))
            ]
        else:
            raise PlanError(f"by must be 'rank' or 'module'; got {by!r}.")
        return pd.DataFrame(rows)

    def figure(self) -> Any:
        """A plotly figure: stacked bars of the parts, persistent and at the peak, of up to 16 ranks: the fullest."""
        ranks = sorted(self.ranks, key=lambda rank: rank.peak.total, reverse=True)[:_MAX_RANKS]
        ranks.sort(key=lambda rank: rank.rank)
        moments = [(rank, moment) for rank in ranks for moment in ("persistent", "peak")]
        axis = [[f"rank {rank.rank}" for rank, _ in moments], [moment for _, moment in moments]]
        unit = unit_for(rank.peak.total for rank in ranks)
        held = [getattr(rank, moment).as_dict() for rank, moment in moments]
        bars = [
            bar(_LABELS.get(part, part), axis, [unit.of(parts[part]) for parts in held], paint_of(part))
            for part in held[0]
            if any(parts[part] for parts in held)
        ]
        title, order = _title(self).partition(": ")[0], {"traceorder": "normal"}
        return plotly_figure(bars, titled(title, barmode="stack", yaxis=titled(unit.name), legend=order))

    def __str__(self) -> str:
        """A table in plain text."""
        return text_table(f"{_title(self)}\n{_where(self)}", *_table(self.worst), _notes(self))

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        page = html_table(f"{_title(self)}. {_where(self)}", *_table(self.worst), _notes(self))
        return {"text/plain": str(self), "text/html": page}


def _gib(sizes: Mapping[str, int]) -> dict[str, float]:
    return {f"{name}_gib": size / GIB for name, size in sizes.items()}


def _notes(plan: MemoryPlan) -> tuple[str, ...]:
    """The interval and the assumptions."""
    low, high = plan.interval_bytes
    if low == high:
        return plan.notes
    unit = unit_for((high,))
    on = "fragmentation, and on the workspaces of GPU kernels" if plan.device == "cuda" else "what libraries allocate"
    between = f"Expected: {unit.text(low)} to {unit.text(high)} {unit.name}; it depends most on {on}."
    return between, *plan.notes


def _table(rank: RankMemory) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows: the rank's memory between steps and at its peak."""
    unit = unit_for((rank.persistent.total, rank.peak.total))
    parts = zip(rank.persistent.as_dict().items(), rank.peak.as_dict().values(), strict=True)
    shown = [(_LABELS.get(part, part), size, highest) for (part, size), highest in parts if size or highest]
    rows = [*shown, ("total", rank.persistent.total, rank.peak.total)]
    return (
        ("", f"persistent, {unit.name}", f"peak, {unit.name}"),
        [(label, unit.text(size), unit.text(highest)) for label, size, highest in rows],
    )


def _title(plan: MemoryPlan) -> str:
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    return (
        f"{plan.model}, {plan.num_parameters:,} parameters, {plan.strategy} on {plan.world_size} "
        f"rank{'s' if plan.world_size > 1 else ''} ({mesh}), {plan.device}: {plan.method}"
    )


def _where(plan: MemoryPlan) -> str:
    worst, several = plan.worst, len(plan.ranks) > 1
    place = f"Rank {worst.rank}" + (f", the highest peak of {len(plan.ranks)} ranks" if several else "")
    if not worst.phase:
        return place
    where = f" of {worst.module}" if worst.module else ""
    return f"{place}; its peak is in {worst.phase}{where}"
