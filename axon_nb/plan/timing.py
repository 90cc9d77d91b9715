"""`plan.step_time`: how long a training step takes, with the range that is expected and its main assumptions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.plan import muon
from axon_nb.plan.arguments import ZERO_2, check_int, check_number
from axon_nb.plan.display import Shown, Table, bar, format_flops, format_ms, paint_of, plotly_figure, titled
from axon_nb.plan.hardware import FITTED, Link, Rates, Work, resolve_rates
from axon_nb.plan.pipeline import SchedulePlan, StageTimes, schedule
from axon_nb.plan.tracing.subject import owner
from axon_nb.plan.traffic.communication import traffic_of
from axon_nb.plan.traffic.layout import ParallelLayout, TrafficOptions
from axon_nb.plan.traffic.muon import step_work
from axon_nb.plan.traffic.parallelism import boundaries
from axon_nb.plan.traffic.plan import GRADIENT_AXES, CommunicationPlan, Traffic
from axon_nb.records.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

Predict = Callable[[Rates, Mapping[str, Link], float], float]
"""Returns a step's seconds with these rates and links, and this fraction of hidden communication."""
SPREADS = {"matrix products": 0.25, "other operations": 0.4, "links": 0.3, "hidden": 0.3}
"""By how much each assumption may be off, as a fraction of it. With these, four of five published steps lie in their
intervals (tests/plan/test_published.py)."""
_HEAD = ("part", "ms", "share")
_PHASES = ("forward", "backward")
_COPIED = ("all_gather", "all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """An interval of a prediction, and what it depends on."""

    low_s: float
    high_s: float
    depends_on: tuple[str, ...]
    """The assumptions that change the prediction most, the most important first: at most two."""

    def __str__(self) -> str:
        text = f"expected: {format_ms(self.low_s)} to {format_ms(self.high_s)} ms"
        return f"{text}; it depends most on {' and on '.join(self.depends_on)}" if self.depends_on else text


def estimate_uncertainty(predict: Predict, rates: Rates, links: Mapping[str, Link], overlap: float) -> Uncertainty:
    """Vary the assumptions one by one, and combine the changes as independent errors.

    Args:
        predict: Predicts the step.
        rates: Rates of one rank.
        links: The links by axis.
        overlap: Fraction of overlappable communication that is hidden.
    """
    seconds = predict(rates, links, overlap)
    changes: dict[str, tuple[float, float]] = {}

    def vary(name: str, spread: float, at: Callable[[float], float]) -> None:
        changes[name] = max(seconds - at(1 + spread), 0.0), max(at(1 - spread) - seconds, 0.0)

    def attention(factor: float) -> dict[str, Any]:
        return {"attention_flops_per_s": rates.attention_flops_per_s and rates.attention_flops_per_s * factor}

    vary(
        "the rate of matrix products",
        SPREADS["matrix products"],
        lambda factor: predict(
            replace(rates, flops_per_s=rates.flops_per_s * factor, **attention(factor)), links, overlap
        ),
    )
    if (moved := rates.bytes_per_s) is not None:
        vary(
            "the rate of other operations",
            SPREADS["other operations"],
            lambda factor: predict(replace(rates, bytes_per_s=moved * factor), links, overlap),
        )

    def with_bandwidth(axis: str, factor: float) -> float:
        return predict(rates, {**links, axis: _faster(links[axis], factor)}, overlap)

    for axis in links:
        vary(f"the bandwidth along {axis}", SPREADS["links"], functools.partial(with_bandwidth, axis))
    if links:
        vary(
            "how much communication is hidden",
            SPREADS["hidden"],
            lambda factor: predict(rates, links, min(overlap * factor, 1.0)),
        )
    low, high = (math.sqrt(sum(change[side] ** 2 for change in changes.values())) for side in (0, 1))
    order = sorted((name for name in changes if max(changes[name]) > 0), key=lambda name: -max(changes[name]))
    return Uncertainty(seconds - low, seconds + high, tuple(order[:2]))


def _faster(link: Link, factor: float) -> Link:
    costs = {name: replace(cost, s_per_byte=cost.s_per_byte / factor) for name, cost in link.measured.items()}
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor, measured=costs)


@dataclass(frozen=True, repr=False)
class StepTime(Shown):
    """Time of a training step and its parts; made by `axon_nb.plan.step_time`."""

    title: str
    """Model and layout, as text."""
    parts: Mapping[str, float]
    """Seconds per part, of the slowest rank along ``pp``; they add up to the step."""
    flops: float
    """FLOPs of that rank in a step."""
    assumptions: tuple[str, ...]
    """Assumptions behind the prediction."""
    communication: CommunicationPlan = field(repr=False)
    """The communication, with times."""
    schedule: SchedulePlan | None = field(default=None, repr=False)
    """The pipeline schedule with these stages' times; None: no pipeline."""
    uncertainty: Uncertainty | None = None
    """The range of seconds in which the step is expected, and what it depends on; None: not estimated."""

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of the rank over the whole step."""
        return self.flops / self.total_s if self.total_s else 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that computation does not hide."""
        return sum(seconds for part, seconds in self.parts.items() if part.startswith("communication"))

    def to_frame(self) -> pd.DataFrame:
        """One row per part: part, ms, share (0 to 1)."""
        import pandas as pd

        rows = [(part, 1e3 * seconds, seconds / (self.total_s or 1.0)) for part, seconds in self.parts.items()]
        return pd.DataFrame(rows, columns=["part", "ms", "share"])

    def figure(self) -> Any:
        """A plotly figure: one bar of milliseconds, part by part."""
        bars = [
            bar(part, [1e3 * seconds], ["step"], paint_of(part), orientation="h")
            for part, seconds in self.parts.items()
        ]
        layout = titled(
            f"{self.title}: {format_ms(self.total_s)} ms per step",
            barmode="stack",
            xaxis=titled("ms"),
            yaxis={"showticklabels": False},
            legend={"traceorder": "normal"},
            height=320,
        )
        return plotly_figure(bars, layout)

    def _summary(self) -> str:
        return (
            f"{self.title}: {format_ms(self.total_s)} ms per step, {format_flops(self.flops_per_s)} per rank, "
            f"{format_ms(self.exposed_s)} ms of exposed communication"
        )

    def _table(self) -> Table:
        total = self.total_s or 1.0
        rows = [(part, format_ms(seconds), f"{seconds / total:.1%}") for part, seconds in self.parts.items()]
        expected = () if self.uncertainty is None else (str(self.uncertainty),)
        return self._summary(), _HEAD, rows, (*expected, *self.assumptions)


def compute_work(layout: ParallelLayout, pp_rank: int) -> dict[str, Work]:
    """Return the forward and backward work of a rank's whole batch.

    Args:
        layout: The layout.
        pp_rank: The rank along ``pp``.
    """
    stages = layout.stages
    if stages is None:
        return {phase: _of_modules(layout, phase, None) for phase in _PHASES}
    work = {phase: Work() for phase in _PHASES}
    for stage in stages.on_rank(pp_rank):
        for phase in _PHASES:
            work[phase] += _of_stage(layout, stage, phase).times(stages.num_microbatches)
    return work


def _of_modules(layout: ParallelLayout, phase: str, stage: int | None) -> Work:
    """The work in one stage; None: of the whole model."""
    total = _sum(layout, phase, stage)
    if layout.activation_checkpointing and phase == "backward":
        blocks_only = layout.activation_checkpointing is True
        total += _sum(layout, "forward", stage, blocks_only=blocks_only).times(float(layout.activation_checkpointing))
    return total


def _sum(layout: ParallelLayout, phase: str, stage: int | None, *, blocks_only: bool = False) -> Work:
    """The work of one rank: tp divides products where their module is, the rest with its part; cp divides all."""
    tp, trace, stages = layout.size("tp"), layout.trace, layout.stages
    children = None if stages is None or stage is None else stages.children
    key = phase, children, stage, blocks_only, tp, layout.size("cp"), frozenset(layout.styles.items())
    if key not in trace.sums:
        total = Work()
        for path, work in trace.work.get(phase, {}).items():
            if (stages is None or stage is None or stages.stage_of(path) == stage) and (
                not blocks_only or owner(path, trace.blocks)
            ):
                shares = [
                    1 / tp if is_divided else 1.0 for is_divided in (layout.divides(path), layout.divides_part(path))
                ]
                total += work.scaled(*shares)
        trace.sums[key] = total.scaled(1 / layout.size("cp"))
    return trace.sums[key]


def _of_stage(layout: ParallelLayout, stage: int, phase: str) -> Work:
    """The work of one microbatch in one stage; the last stage includes the loss."""
    assert layout.stages is not None
    return _of_modules(layout, phase, stage).scaled(1 / layout.stages.num_microbatches)


def optimizer_work(layout: ParallelLayout, pp_rank: int) -> Work:
    """Return the work of the optimizer's step on one rank.

    Args:
        layout: The layout.
        pp_rank: The rank along ``pp``.
    """
    whole = layout.trace.total("optimizer")
    trained = layout.trace.cached("trained parameters", lambda: set(layout.trace.ready) - layout.matrices)
    total = layout.trace.cached(
        "sizes of trained parameters", lambda: [p.numel() for name, p in layout.trace.parameters if name in trained]
    )
    here = [p for p in layout.parameters_by_pp_rank[pp_rank] if p.name in trained]
    of_muon = step_work(layout, pp_rank)
    if not total:
        return whole + of_muon
    fixed = {"ddp": 1, "no_shard": 1, "hybrid_shard": layout.size("shard")}.get(layout.strategy)
    shards = [fixed or layout.gradient_group(experts=p.is_expert)[1] for p in here]
    share = sum(math.prod(p.shape) / num for p, num in zip(here, shards, strict=True)) / sum(total)
    # ZeRO-1 assigns whole parameters to ranks instead of splitting them.
    calls = sum(1 / num for num in shards) if layout.strategy == "optimizer_state" else len(here)
    return Work(whole.flops * share, whole.bytes * share, whole.ops * calls / len(total)) + of_muon


def copy_work(layout: ParallelLayout, traffic: CommunicationPlan, pp_rank: int) -> Work:
    """Return the work of data parallelism's copies into and out of communication buffers.

    DDP copies gradients into buckets and back; FSDP2 copies parameters out of the gathered buffer, and gradients into
    the reduced one (`split_with_sizes_copy` and `chunk_cat` of torch.distributed.fsdp). Each copy is a read and a
    write.

    Args:
        layout: The layout.
        traffic: Its communication.
        pp_rank: The rank along ``pp``.
    """
    rows = [
        (row, 1 if row.once or row.phase == "optimizer" else layout.num_batches)
        for row in traffic.select(pp_rank=pp_rank)
        if row.averages and row.operation in _COPIED
    ]
    return Work(
        bytes=float((4 if layout.strategy == "ddp" else 2) * sum(times * row.bytes for row, times in rows)),
        ops=float(sum(times * row.calls for row, times in rows)),
    )


def wrapper_s(layout: ParallelLayout, rates: Rates, pp_rank: int) -> float:
    """Return the seconds of a step that the strategy's wrapper itself takes.

    Args:
        layout: The layout.
        rates: Rates of one rank.
        pp_rank: The rank along ``pp``.
    """
    seconds = (layout.size(*GRADIENT_AXES) > 1 and wrapper_s_per_parameter(rates, layout.strategy)) or 0.0
    return seconds * len(layout.parameters_by_pp_rank[pp_rank])


def wrapper_s_per_parameter(rates: Rates, strategy: str) -> float | None:
    """Return seconds per parameter of the strategy's wrapper, or of a similar one; None: not measured."""
    alike = "ddp" if strategy in ("ddp", "optimizer_state") else "full_shard"
    return rates.wrappers.get(strategy, rates.wrappers.get(alike))


def pipeline_schedule(
    layout: ParallelLayout, traffic: CommunicationPlan, rates: Rates, overlap: float = 1.0
) -> SchedulePlan:
    """Return the pipeline schedule with the times of its stages and messages.

    Args:
        layout: A layout with stages.
        traffic: Its communication, with times.
        rates: Rates of one rank.
        overlap: Fraction of overlappable communication that computation hides, 0 to 1.
    """
    stages = layout.stages
    assert stages is not None
    link = traffic.links.get("pp")
    delays = [
        [link.seconds("send", size, 2) if link and size else 0.0 for size in sizes]
        for sizes in boundaries(layout, stages)
    ]
    times = []
    for stage in range(stages.num_stages):
        pp_rank = stages.rank_of_stage[stage]
        seconds = []
        for phase in _PHASES:
            times_run = stages.num_microbatches * len(stages.on_rank(pp_rank))
            computing = rates.seconds(_of_stage(layout, stage, phase), phase)
            rows = [row for row in traffic.select(phase=phase, pp_rank=pp_rank) if row.is_within_stage]
            seconds.append(computing + _exposed_s(rows, computing * times_run, overlap) / times_run)
        times.append(StageTimes(*seconds))
    return schedule(
        stages.schedule,
        stages.num_stages,
        stages.num_microbatches,
        times,
        num_ranks=stages.num_ranks,
        latency_s=[forward for forward, _ in delays],
        backward_latency_s=[backward for _, backward in delays],
    )


def step_time(
    model: Any,
    world_size: int | None = None,
    *,
    rates: Rates | float | str | Any,
    links: Link | str | Mapping[str, Link | str] | Any = None,
    overlap: float | None = None,
    optimizer: Callable[..., Optimizer] | str | None = "AdamW",
    activation_checkpointing: bool | float = False,
    compiled: bool = False,
    cuda_graphs: bool = False,
    gradient_accumulation: int = 1,
    **layout: Unpack[TrafficOptions],
) -> StepTime:
    """Predict a step's time: compute, exposed communication, and the pipeline bubble.

        plan.step_time(GPTConfig(hidden=1024, blocks=24), 64, batch=8, rates="h100", links="h100")
        here = plan.calibrate(model=small, inputs=batch, optimizer=torch.optim.AdamW)   # on ranks
        plan.step_time(large, 2, inputs=batch, rates=here, links=here, strategy="ddp")

    Args:
        model: The same as in `communication`.
        world_size: Number of ranks; None: the mesh says.
        rates: FLOP/s that a rank reaches in its compute dtype; `Rates`, which cover other operations too; a GPU's name
            such as ``"h100"``, for what published runs achieve with it; or the result of `calibrate`.
        links: The same as in `communication`; a GPU's name stands for hosts of 8 with NVLink and one network port per
            GPU.
        overlap: Fraction of overlappable communication that computation hides, 0 to 1; None: as `calibrate` measured,
            or 1.
        optimizer: A function that makes it from parameters, or its name in `torch.optim`; None: no optimizer step.
        activation_checkpointing: True: backward recomputes the forward of the model's equal blocks; or a fraction of
            the whole forward, 0 to 1.
        compiled: Whether `torch.compile` fuses what is not a matrix product: fewer bytes move, and fewer operations are
            issued.
        cuda_graphs: Whether CUDA graphs replay the step, as by ``torch.compile(mode="reduce-overhead")``: the host
            launches one graph per phase, of each microbatch in pipelines, instead of each operation.
        gradient_accumulation: Batches per step: each runs forward and backward, and the last one's backward averages
            the gradients (`accumulating`). A pipeline accumulates its ``num_microbatches`` instead.
        **layout: The same as in `communication`; ``inputs`` is required except for a GPTConfig.

    Raises:
        UsageError: the model cannot be built or laid out in this way, or rates or links are missing; the message says
            what works.
    """
    if not isinstance(again := activation_checkpointing, bool):
        again = check_number("activation_checkpointing", again, rule="True, False or a fraction of forward", most=1.0)
    laid_out = ParallelLayout.from_options(
        model,
        world_size,
        layout,
        optimizer,
        activation_checkpointing=again,
        num_batches=check_int("gradient_accumulation", gradient_accumulation),
    )
    return step_time_of(laid_out, rates=rates, links=links, overlap=overlap, compiled=compiled, cuda_graphs=cuda_graphs)


def step_time_of(
    layout: ParallelLayout,
    *,
    rates: Any,
    links: Any = None,
    overlap: float | None = None,
    compiled: bool = False,
    cuda_graphs: bool = False,
) -> StepTime:
    """Predict the time of a layout's step.

    Args:
        layout: A layout with its optimizer.
        rates: The same as in `step_time`.
        links: The same as in `step_time`.
        overlap: The same as in `step_time`.
        compiled: The same as in `step_time`.
        cuda_graphs: The same as in `step_time`.

    Raises:
        UsageError: the layout has no inputs, pipelines accumulate batches, or rates or links are missing.
    """
    found, share = resolve_rates(rates), _overlap(overlap, rates, links)
    if compiled:
        found = found.compiled(FITTED.compiled)
    if cuda_graphs:
        found = replace(found, is_graphed=True)
    if not layout.trace.has_inputs:
        raise UsageError(
            "inputs= is required, because the time of a step depends on the batch: for example torch.zeros(8, 64)."
        )
    if layout.stages is not None and layout.num_batches > 1:
        raise UsageError(
            "A pipeline accumulates gradients over its microbatches: give num_microbatches= instead of "
            "gradient_accumulation=."
        )
    traffic = traffic_of(layout, links)
    if traffic.rows and not traffic.links:
        raise UsageError(
            "links= is required, because ranks communicate: a preset such as 'nvlink4', a Link(…), or the result of "
            "plan.calibrate()."
        )
    step = predict_step(layout, traffic, found, share)
    return replace(step, uncertainty=uncertainty_of(step, layout, found, share))


def uncertainty_of(step: StepTime, layout: ParallelLayout, rates: Rates, overlap: float) -> Uncertainty:
    """Return how a step depends on its assumptions.

    Args:
        step: Predicted by `predict_step` with the other arguments.
        layout: The same as in `predict_step`.
        rates: The same as in `predict_step`.
        overlap: The same as in `predict_step`.
    """

    def seconds(changed: Rates, links: Mapping[str, Link], hidden: float) -> float:
        rows = tuple(row.timed(links.get(row.axis)) for row in step.communication.rows)
        return predict_step(layout, replace(step.communication, rows=rows, links=links), changed, hidden).total_s

    return estimate_uncertainty(seconds, rates, step.communication.links, overlap)


def predict_step(
    layout: ParallelLayout,
    traffic: CommunicationPlan,
    rates: Rates,
    overlap: float,
    *,
    plan: SchedulePlan | None = None,
) -> StepTime:
    """Predict a layout's step.

    Args:
        layout: A layout with its optimizer.
        traffic: Its communication, with times.
        rates: Rates of one rank.
        overlap: Fraction of overlappable communication that computation hides, 0 to 1.
        plan: The pipeline schedule, if known: it does not depend on the strategy.
    """
    if layout.stages is not None and plan is None:
        plan = pipeline_schedule(layout, traffic, rates, overlap)
    found = [
        _parts(layout, traffic, rates, overlap=overlap, pp_rank=pp_rank, plan=plan) for pp_rank in traffic.pp_ranks
    ]
    slowest = max(traffic.pp_ranks, key=lambda pp_rank: sum(found[pp_rank].values()))
    work = compute_work(layout, slowest)
    return StepTime(
        layout.title,
        found[slowest],
        layout.num_batches * sum(phase.flops for phase in work.values()),
        (*_assumptions(layout, rates, overlap), *_unknown(layout, rates, sum(found[slowest].values()))),
        traffic,
        plan,
    )


def _parts(
    layout: ParallelLayout,
    traffic: CommunicationPlan,
    rates: Rates,
    *,
    overlap: float,
    pp_rank: int,
    plan: SchedulePlan | None,
) -> dict[str, float]:
    """Seconds per part, of one rank along ``pp``."""
    work, batches = compute_work(layout, pp_rank), layout.num_batches
    parts = {f"compute, {phase}": batches * rates.seconds(done, phase) for phase, done in work.items()}
    if (step := optimizer_work(layout, pp_rank)).ops:
        parts["compute, optimizer"] = rates.seconds(step, "optimizer")
    if extra := rates.seconds(copy_work(layout, traffic, pp_rank), "") + wrapper_s(layout, rates, pp_rank):
        parts["copies and wrapper"] = extra
    for phase in ("forward", "backward", "optimizer"):
        # The schedule includes what a pipeline sends between stages, and what their layers send.
        selected = traffic.select(phase=phase, pp_rank=pp_rank)
        rows = [row for row in selected if plan is None or not (row.axis == "pp" or row.is_within_stage)]
        computing = parts.get(f"compute, {phase}", 0.0) / batches
        exposed = _exposed_s(rows, computing, overlap)
        if batches > 1 and phase in work:
            exposed += (batches - 1) * _exposed_s([row for row in rows if not row.once], computing, overlap)
        if exposed:
            parts[f"communication, {phase}"] = exposed
    if plan is not None:
        inside = 0.0
        for phase in ("forward", "backward", "optimizer"):
            rows = [row for row in traffic.select(phase=phase, pp_rank=pp_rank) if row.is_within_stage]
            inside += _exposed_s(rows, parts.get(f"compute, {phase}", 0.0), overlap)
        if inside:
            parts["communication, within stages"] = inside
        parts["bubble and messages"] = plan.step_s - plan.busy_s[pp_rank]
    return parts


def _exposed_s(rows: Sequence[Traffic], computing_s: float, overlap: float) -> float:
    """Seconds of communication that one pass's computation does not hide."""
    covered = sum(row.seconds or 0.0 for row in rows if row.overlaps_with)
    return sum(row.seconds or 0.0 for row in rows) - overlap * min(covered, computing_s)


def _assumptions(layout: ParallelLayout, rates: Rates, overlap: float) -> Iterator[str]:
    moving = "other operations are free"
    if rates.bytes_per_s is not None:
        moving = f"other operations {format_bytes(round(rates.bytes_per_s))}/s"
        moving += f" and {1e6 * rates.launch_s:.3g} us per launch" if rates.launch_s else ""
    yield f"rates ({rates.source}): {format_flops(rates.flops_per_s)}, {moving}"
    if rates.is_graphed:
        yield "the host launches one CUDA graph per phase; the operations in it follow each other without gaps"
    elif rates.issue_s:
        yield (
            f"the host issues an operation in {1e6 * rates.issue_s:.3g} us (assumed), which is hidden where computing "
            "takes longer; CUDA graphs avoid it: cuda_graphs=True"
        )
    if rates.factors:
        factors = ", ".join(f"{phase} {factor:.3g}" for phase, factor in rates.factors.items())
        yield f"scaled by the measured model's factors: {factors}"
    if layout.size(*GRADIENT_AXES) > 1:
        wrapper = wrapper_s_per_parameter(rates, layout.strategy)
        known = "its wrapper is free" if wrapper is None else f"its wrapper {1e6 * wrapper:.3g} us per parameter"
        if layout.strategy == "shard_grad_op":
            yield ZERO_2
        yield f"{layout.strategy} copies what it sends at the rate of other operations; {known}"
        yield (
            f"{overlap:.0%} of overlappable communication is hidden, up to the computation's length: all gradients but "
            "the last bucket or unit, and all FSDP gathers but the first unit"
        )
    if layout.size("tp") > 1:
        yield (
            "tp divides the matrix products that it shards, and the other operations of their blocks, evenly; none of "
            "its communication is hidden"
        )
    yield from _of_layout(layout)
    yield "all ranks are equally fast and otherwise idle; data loading is free"


def _of_layout(layout: ParallelLayout) -> Iterator[str]:
    if layout.experts:
        yield "every expert gets as many tokens; none of the time in which they travel is hidden"
    if layout.matrices:
        yield f"{muon.NOTE}; none of the time in which matrices travel is hidden"
    if layout.size("cp") > 1:
        yield (
            "ranks along cp compute equal parts; computation hides how keys and values travel, and not how their "
            "gradients do"
        )
    if layout.num_batches > 1:
        yield (
            f"{layout.num_batches} batches are accumulated: only the last one's gradients are averaged; the "
            "communication shown is that of its pass"
        )
    if layout.stages is not None:
        yield "a microbatch takes its share of the batch's time; senders do not wait for delivery"


def _unknown(layout: ParallelLayout, rates: Rates, total_s: float) -> Iterator[str]:
    """Name the operations whose FLOPs are unknown, if their bytes alone take 1 % of the step."""
    limit = 0.01 * total_s * rates.bytes_per_s if rates.bytes_per_s else 0.0
    names = sorted(name for name, moved in layout.trace.unknown.items() if moved >= limit)
    if names:
        yield f"only the bytes of {', '.join(names)} are counted: their FLOPs are unknown, so the step takes longer"


def _overlap(given: float | None, *calibrations: Any) -> float:
    if given is None:
        return float(next((c.overlap for c in calibrations if hasattr(c, "overlap")), 1.0))
    return check_number("overlap", given, rule="a fraction from 0 (nothing is hidden) to 1", most=1.0)
