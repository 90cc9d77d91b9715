"""`plan.search`: which layouts fit, and which is the fastest, among all meshes that a number of GPUs allows.

Memory is estimated for all layouts, then simulated for the best, all in one process. The estimate has model states by
formula and the rest from a traced step: fast enough to rank hundreds of layouts.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch
from msgspec import Struct
from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.parallel.data.units import Wrap
from axon_nb.parallel.memory import OptimizerKind, ShardingStrategy, model_states
from axon_nb.parallel.muon import Muon
from axon_nb.parallel.pipeline.schedule import PipelineMemoryStats, PipelineSchedule
from axon_nb.plan.arguments import (
    SINGLE_AXIS_STRATEGIES,
    UNSHARDED,
    ZERO_2,
    check_callable,
    check_callbacks,
    check_choice,
    check_int,
    check_number,
)
from axon_nb.plan.display import format_flops
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest
from axon_nb.plan.hardware import CARDS, FITTED, Link, Rates, resolve_links, resolve_rates
from axon_nb.plan.layout_search.meshes import AxisLimits, CandidateMesh, candidate_meshes, divisors
from axon_nb.plan.layout_search.plan import Candidate, SearchPlan
from axon_nb.plan.models import check_model, dtype_name, model_by_name
from axon_nb.plan.muon import NOTE, is_muon
from axon_nb.plan.pipeline import SchedulePlan
from axon_nb.plan.process import run_in_process
from axon_nb.plan.timing import pipeline_schedule, predict_step
from axon_nb.plan.tracing import subject
from axon_nb.plan.tracing.trace import ModelTrace, TraceInterpolator
from axon_nb.plan.traffic.communication import traffic_of
from axon_nb.plan.traffic.layout import LocalTensor, ParallelLayout
from axon_nb.records.units import format_bytes

_GIB = 1024.0**3
_NODE = 8
"""GPUs per NVLink domain, for defaults."""
MIN_POSITIONS = 4096
"""Fewest positions of a sample that a search leaves to each rank along ``cp``: below it other axes suffice."""
MemoryEstimator = Callable[[ParallelLayout], dict[str, int]]
"""Returns bytes by part of the rank that needs most."""
DIVIDED = ("column", "heads")
"""Styles whose outputs are a rank's part."""
ALLOWANCE = 0.05
"""Fragmentation allowance of CUDA's allocator, as a fraction of everything else; as in `axon_nb.plan.memory`."""


def estimate_memory(layout: ParallelLayout) -> dict[str, int]:
    """Estimate bytes by part of the rank along ``pp`` that needs most.

    - ``model states`` are exact (`axon_nb.parallel.memory`).
    - ``unsharded parameters``: the two largest units, which FSDP holds at once, and what is in no unit; or all if they
      stay unsharded until backward.
    - ``gradients``: the largest unit's before and during reduction, and of what is in no unit; all gradients of
      pipeline stages, until the last microbatch; DDP's buckets.
    - ``activations``: what forward saves of a rank's batch; with activation checkpointing, the inputs of the equal
      blocks, the largest block's activations, and what is outside. Divided by ``tp`` where it shards, and by ``cp``; a
      pipeline counts its live microbatches.
    - ``temporary``: a gradient of the size of the largest output.
    - ``fragmentation``: an allowance on GPUs.
    """
    return max(
        (_of_pp_rank(layout, parameters, pp_rank) for pp_rank, parameters in enumerate(layout.parameters_by_pp_rank)),
        key=lambda parts: sum(parts.values()),
    )


def _of_pp_rank(layout: ParallelLayout, parameters: Sequence[LocalTensor], pp_rank: int) -> dict[str, int]:
    unsharded, gradients = _unsharded(layout, parameters)
    parts = {
        "model states": _states(layout, parameters),
        "unsharded parameters": unsharded,
        "gradients": gradients,
        "activations": _activations(layout, pp_rank),
        "temporary": _temporary(layout, pp_rank),
    }
    if layout.device == "cuda":
        parts["fragmentation"] = round(ALLOWANCE * sum(parts.values()))
    return parts


class _CachedOptimizerKind(OptimizerKind):
    """An OptimizerKind that is tried once per kind of parameter."""

    @functools.cached_property
    def _known(self) -> dict[tuple[torch.dtype, bool], int]:
        return {}

    def bytes_per_element(self, dtype: torch.dtype, *, trained: bool = True) -> int:
        """Return the cached result of the base class."""
        key = dtype, trained
        if key not in self._known:
            self._known[key] = super().bytes_per_element(dtype, trained=trained)
        return self._known[key]


def _states(layout: ParallelLayout, parameters: Sequence[LocalTensor]) -> int:
    make = layout.optimizer or torch.optim.AdamW
    kinds: dict[bool, OptimizerKind] = layout.trace.cached(
        ("states of", make),
        lambda: {
            True: _CachedOptimizerKind(Muon),
            False: _CachedOptimizerKind(torch.optim.AdamW if layout.matrices else make),
        },
    )
    strategy = ShardingStrategy.NO_SHARD if layout.strategy == "ddp" else ShardingStrategy(layout.strategy)
    return sum(
        model_states(
            [(p.shape, p.dtype, p.requires_grad) for p in held],
            strategy,
            world_size=layout.gradient_group(experts=experts)[1],
            optimizer=[kinds[p.name in layout.matrices] for p in held],
        ).total_bytes
        for experts in (False, True)
        for held in ([p for p in parameters if p.is_expert is experts],)
    )


def _unsharded(layout: ParallelLayout, parameters: Sequence[LocalTensor]) -> tuple[int, int]:
    """Bytes of unsharded parameters, and of their gradients on top of the model states."""
    num_ranks = {experts: layout.gradient_group(experts=experts)[1] for experts in (False, True)}
    if layout.strategy in UNSHARDED:
        cast = sum(p.elements * layout.mixed_precision.itemsize for p in parameters) if layout.mixed_precision else 0
        return cast, sum(p.nbytes for p in parameters if p.has_grad and num_ranks[p.is_expert] > 1)
    units: dict[str, int] = {}
    trained: dict[str, int] = {}
    reduced: dict[str, int] = {}
    for p in parameters:
        if num_ranks[p.is_expert] == 1 and layout.mixed_precision is None:
            continue
        # Ranks along ep share experts with others than the rest of their block: a unit of their own.
        name = f"{subject.owner(p.name, layout.units)}{' experts' * p.is_expert}"
        computed = (layout.mixed_precision or p.dtype).itemsize
        units[name] = units.get(name, 0) + p.elements * computed
        if p.has_grad:
            trained[name] = trained.get(name, 0) + p.elements * computed
            reduced[name] = reduced.get(name, 0) + p.elements * p.dtype.itemsize
    if layout.stages is not None:
        return sum(units.values()), sum(reduced.values())
    # The model's own unit stays unsharded from the start of forward to the end of backward.
    root, root_trained, root_reduced = (sizes.pop("", 0) for sizes in (units, trained, reduced))
    stays_unsharded = layout.strategy in ("shard_grad_op", "no_shard")
    largest = sorted(units.values(), reverse=True)
    gradients = max((trained[name] + reduced[name] for name in trained), default=0)
    return root + sum(largest if stays_unsharded else largest[:2]), root_trained + max(root_reduced, gradients)


def _saved(layout: ParallelLayout) -> dict[str, int]:
    """Bytes that forward saves on one rank along ``tp``, by saving module.

    Tensors computed from a column layer's output are sharded until a row layer reduces them. With sequence parallelism
    the rest is sharded along the sequence, except what column layers have gathered (Korthikanti et al., 2022, section
    4.2).
    """
    sizes: dict[str, int] = {}
    styles = layout.styles
    for (keeper, sources), size in layout.trace.saved.items():
        is_sharded = any(styles.get(source) in DIVIDED for source in sources)
        if layout.sequence and not is_sharded:
            is_sharded = any(source in styles for source in sources) and not styles.get(keeper, "").startswith("column")
        sizes[keeper] = sizes.get(keeper, 0) + (size // layout.size("tp") if is_sharded else size)
    return sizes


def _on_rank(layout: ParallelLayout, path: str, pp_rank: int) -> bool:
    """Whether a rank along ``pp`` holds a module; the last one also has the loss."""
    return layout.stages is None or layout.stages.rank_of(path) == pp_rank


def _activations(layout: ParallelLayout, pp_rank: int) -> int:
    trace, stages = layout.trace, layout.stages
    saved = {keeper: size for keeper, size in _saved(layout).items() if _on_rank(layout, keeper, pp_rank)}
    parts: tuple[int, ...] = sum(saved.values()), 0
    if layout.activation_checkpointing:
        inside: dict[str, int] = {}
        for keeper, size in saved.items():
            block = subject.owner(keeper, trace.blocks)
            inside[block] = inside.get(block, 0) + size
        outside = inside.pop("", 0)
        # Each block's input, as large as its output, is all that is kept of it.
        kept = sum(sum(fact.nbytes for fact in trace.outputs.get(name, ())) for name in inside)
        parts = outside + kept, max(inside.values(), default=0)
    parts = tuple(size // layout.size("cp") for size in parts)
    if stages is None:
        return sum(parts)
    live = trace.cached(
        ("live microbatches", stages.schedule, stages.num_ranks, stages.num_stages, stages.num_microbatches),
        lambda: PipelineMemoryStats.of(
            stages.schedule,
            num_ranks=stages.num_ranks,
            num_microbatches=stages.num_microbatches,
            num_stages=stages.num_stages,
        ),
    )
    count = len(stages.on_rank(pp_rank)) * stages.num_microbatches
    return int(parts[0] * live.peak_per_rank[pp_rank] // count + parts[1] // stages.num_microbatches)


def _temporary(layout: ParallelLayout, pp_rank: int) -> int:
    sizes = [
        fact.nbytes // layout.size("cp") // (layout.size("tp") if layout.divides_part(name) else 1)
        for name, facts in layout.trace.outputs.items()
        if _on_rank(layout, name, pp_rank)
        for fact in facts
    ]
    return max(sizes, default=0) // (1 if layout.stages is None else layout.stages.num_microbatches)


@dataclass(frozen=True)
class Simulations:
    """Simulates layouts of a model."""

    model: Any
    options: Mapping[str, Any]
    """Fields of `MemoryRequest` that all layouts share."""
    limit: float
    """Bytes of memory per rank."""
    progress: Callable[[float, str], None] | None = None
    cancel: threading.Event | None = None

    def simulate_best(self, plan: SearchPlan, count: int) -> SearchPlan:
        """Return the search with its best layouts simulated and still fitting.

        Args:
            plan: A plan with estimated memory.
            count: How many of the best to simulate.

        Raises:
            PlanError: the model cannot be sent to the simulator process.
            SimulatorError: that process failed.
            PlanCancelledError: it was cancelled.
        """
        check_model(self.model)
        candidates, refused = list(plan.candidates), set[int]()
        while True:
            candidates.sort(key=lambda one: one.sort_key)
            best = [one for one in candidates if one.fits and id(one) not in refused][:count]
            todo = [one for one in best if not one.simulated]
            if not todo:
                return replace(plan, candidates=tuple(candidates))
            for one, answer in zip(todo, self._answers(todo, plan.global_batch), strict=True):
                if isinstance(answer, str):
                    refused.add(id(one))
                else:
                    candidates[next(n for n, other in enumerate(candidates) if other is one)] = self._evaluated(
                        one, answer
                    )

    def _evaluated(self, one: Candidate, answer: MemoryPlan) -> Candidate:
        parts = {name: size for name, size in answer.worst.peak.as_dict().items() if size}
        return replace(one, simulated=True).with_result(parts, one.step_s, self.limit)

    def _answers(self, todo: Sequence[Candidate], batch: int) -> list[MemoryPlan | str]:
        requests = [self._request(one, batch) for one in todo]
        try:
            task = cloudpickle.dumps(requests)
        except Exception as error:
            raise PlanError(
                f"The model, its inputs or its loss cannot be sent to another process ({error}): give functions that "
                "make what they need, or use simulate=0."
            ) from error
        return run_in_process(simulate_all, task, progress=self.progress, cancel=self.cancel)

    def _request(self, one: Candidate, batch: int) -> MemoryRequest:
        options = dict(self.options)
        mixed = options.pop("mixed_precision")
        return MemoryRequest(
            self.model,
            **one.layout(batch),
            mixed_precision=None if mixed is None else dtype_name(mixed, "mixed_precision"),
            fragmentation=ALLOWANCE,
            **options,
        )


def simulate_all(requests: Sequence[MemoryRequest], report: Callable[[float, str], None]) -> list[MemoryPlan | str]:
    """Simulate each request; runs in the simulator process.

    Args:
        requests: Not checked yet.
        report: Called with the fraction done and the next step.

    Returns:
        For each request its plan, or why it cannot be simulated.
    """
    from axon_nb.plan.footprint.simulate import simulate

    plans: list[MemoryPlan | str] = []
    for number, request in enumerate(requests):

        def report_layout(share: float, text: str, number: int = number) -> None:
            report((number + share) / len(requests), f"layout {number + 1} of {len(requests)}: {text}")

        try:
            plans.append(simulate(request.check(), report_layout))
        except UsageError as error:
            plans.append(str(error))
    return plans


def search(
    model: Any,
    num_gpus: int,
    memory_gib: float,
    *,
    rates: Rates | float | str | Any = None,
    links: Link | str | Mapping[str, Link | str] | Any = None,
    global_batch: int | None = None,
    seq: int | None = None,
    inputs: Any = None,
    target: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Callable[..., Optimizer] | str = "AdamW",
    mixed_precision: torch.dtype | str | None = None,
    wrap: Wrap | str = None,
    strategies: Sequence[Any] | str = ("ddp", "shard_grad_op", "full_shard"),
    schedule: PipelineSchedule | str = PipelineSchedule.ONE_F_ONE_B,
    max_tp: int = _NODE,
    max_ep: int | None = None,
    max_cp: int | None = None,
    overlap: float = 1.0,
    simulate: int = 0,
    progress: Callable[[float, str], None] | None = None,
    cancel: threading.Event | None = None,
    estimate: MemoryEstimator = estimate_memory,
) -> SearchPlan:
    """Rank the layouts of some GPUs: those that fit come first, the fastest at the top.

        plan.search(GPTConfig(hidden=4096, heads=32, blocks=32, context=2048, vocab=50304), 64, 80)
        plan.search(make, 16, 40, global_batch=256, inputs=TensorSpec(("batch", 3, 224, 224)), rates="a100",
                    links={"tp": "nvlink3", "all": "ib-hdr"}, mixed_precision="bfloat16", simulate=1)

    A layout is (dp, ep, cp, tp, pp, strategy, number of microbatches, activation checkpointing). The model takes two or
    three steps on tensors without data; the rest is arithmetic.

    Args:
        model: The same as in `communication`. Pipelines need a Sequential, or a model with a plan for stages or equal
            blocks, as those of Hugging Face; ``tp`` shards the model as `parallelize` does automatically.
        num_gpus: Number of ranks; all are used.
        memory_gib: GiB of memory per GPU.
        rates: The same as in `step_time`; None: an H100's, in TF32 without `mixed_precision`.
        links: The same as in `communication`, for the axes ``dp``, ``tp`` and ``pp``, and ``ep`` and ``cp`` where they
            are tried. None: hosts of 8 H100, with NVLink 4 inside and one InfiniBand NDR port per GPU.
        global_batch: Samples per step over all ranks, divisible by dp x ep; None: two per GPU.
        seq: Tokens in a sample.
        inputs: The model's inputs, where ``"batch"`` stands for one rank's samples: ``TensorSpec(("batch", 1024))``.
            Not needed with a GPTConfig.
        target: The same, for the loss.
        loss: Function of output and target, or of the output alone.
        optimizer: A function that makes it from parameters, or its name in `torch.optim`.
        mixed_precision: dtype of forward and backward, as in `FSDP`; with ``ddp``, of autocast.
        wrap: Which modules are FSDP units, as in `FSDP`; a class may be given by name. Pipeline stages have their own.
        strategies: One or more, for the data axis; pipeline stages use shard_grad_op.
        schedule: Pipeline schedule.
        max_tp: Largest number of ranks along ``tp``, such as the GPUs of a node.
        max_ep: Largest number of ranks along ``ep``. None: as many as divide the experts of each layer; models without
            experts have no such axis.
        max_cp: Largest number of ranks along ``cp``, which must divide the sequence of a model with attention. None: as
            many as leave each rank 4,096 positions.
        overlap: The same as in `step_time`.
        simulate: Simulate the memory of this many of the best layouts, until those at the top are known to fit; a few
            seconds each, in a separate process. 0: all memory is estimated.
        progress: Called with the fraction done, 0 to 1, and the next step, during simulations.
        cancel: Set it to cancel the simulations.
        estimate: Returns bytes by part, of the rank that needs most in a layout.

    Raises:
        UsageError: a number is invalid, or the model cannot be traced.
        SimulatorError: the simulator process failed.
        PlanCancelledError: `cancel` was set.
    """
    whole = {"seq": seq, "max_tp": max_tp, "max_ep": max_ep, "max_cp": max_cp, "simulate": simulate}
    _check(num_gpus, memory_gib, global_batch, overlap, **whole)
    check_callable("loss", loss, "of the output (and the target, if there is one) to a scalar")
    check_callbacks(progress, cancel)
    samples = 2 * num_gpus if global_batch is None else global_batch
    kinds, dtype = _strategies(strategies), subject.resolve_dtype(mixed_precision)
    model = model_by_name(model)
    source = subject.ModelSource(model, inputs, target, loss, seq=seq)
    make = subject.resolve_optimizer(optimizer)
    resolved = resolve_rates(("h100-tf32" if dtype is None else "h100") if rates is None else rates)
    wires = "h100" if links is None else links
    evaluator = _Evaluator(
        source, make, dtype, wrap, PipelineSchedule.of(schedule), kinds, resolved, wires, overlap, memory_gib * _GIB
    )
    traces = TraceInterpolator(source, make, dtype)
    candidates: list[Candidate] = []
    most = {"tp": max_tp, "ep": max_ep, "cp": max_cp}
    limits = _limits(traces, int(samples), int(num_gpus), most)
    for mesh in candidate_meshes(int(num_gpus), int(samples), limits):
        if mesh.reason:
            candidates.append(Candidate(mesh.dp, mesh.tp, mesh.pp, reason=mesh.reason, ep=mesh.ep, cp=mesh.cp))
        else:
            own = samples // (mesh.dp * mesh.ep)
            candidates += evaluator.candidates(mesh, own, traces.at(own), estimate)
    each = f"{memory_gib:g} GiB" if memory_gib >= 1 else format_bytes(round(memory_gib * _GIB))
    plan = SearchPlan(
        f"{num_gpus} GPUs of {each}, {samples} samples per step",
        tuple(sorted(candidates, key=lambda one: one.sort_key)),
        (*traces.units(wrap), *_stages(candidates, traces.first), *evaluator.notes(int(num_gpus), limits)),
        int(samples),
        round(memory_gib * _GIB),
    )
    if not simulate:
        return plan
    options = {"seq": seq, "inputs": inputs, "target": target, "loss": loss, "optimizer": optimizer}
    options |= {"mixed_precision": mixed_precision, "schedule": evaluator.schedule.value, "wrap": wrap}
    return Simulations(model, options, memory_gib * _GIB, progress, cancel).simulate_best(plan, simulate)


def _check(num_gpus: Any, memory_gib: Any, global_batch: Any, overlap: Any, **whole: Any) -> None:
    check_int("num_gpus", num_gpus, what="ranks")
    check_number("memory_gib", memory_gib, rule="a number of GiB above 0, such as 80", least=1e-9)
    if global_batch is not None:
        check_int("global_batch", global_batch, what="samples over all ranks")
    check_number("overlap", overlap, rule="a fraction from 0 (nothing is hidden) to 1", most=1.0)
    for name, value in whole.items():
        if value is not None or name not in ("seq", "max_ep", "max_cp"):
            check_int(name, value, least=0 if name == "simulate" else 1)


def _strategies(strategies: Sequence[Any] | str) -> Sequence[str]:
    names = [strategies] if isinstance(strategies, str) or not isinstance(strategies, Iterable) else list(strategies)
    if not names:
        raise UsageError(f"strategies must be one or more of {', '.join(SINGLE_AXIS_STRATEGIES)}; got {strategies!r}.")
    return [
        check_choice("strategies", str(getattr(name, "value", name)).lower(), SINGLE_AXIS_STRATEGIES) for name in names
    ]


def _stages(candidates: Iterable[Candidate], trace: ModelTrace | None) -> Iterator[str]:
    """Say what pipeline stages are made of, if the model is not a Sequential."""
    if trace is None or not any(one.pp > 1 and not one.reason for one in candidates):
        return
    if parts := subject.pipeline_parts(trace.model):
        yield (
            f"pipeline stages of {type(trace.model).__name__} are parts of {parts[0]}, …, {parts[-1]} with about equal "
            "parameters; make them yourself for Pipeline.from_modules"
        )


class _Evaluator(Struct, frozen=True):
    """Evaluates layouts; holds what all of them share."""

    source: subject.ModelSource
    optimizer: Callable[..., Optimizer] | None
    dtype: torch.dtype | None
    wrap: Any
    schedule: PipelineSchedule
    strategies: Sequence[str]
    rates: Rates
    links: Any
    overlap: float
    limit: float
    """Bytes of memory per rank."""

    def candidates(
        self, mesh: CandidateMesh, batch: int, trace: ModelTrace, estimate: MemoryEstimator
    ) -> Iterator[Candidate]:
        """Yield all layouts on one mesh, evaluated.

        Args:
            mesh: Ranks per axis.
            batch: Samples per rank.
            trace: A trace with that batch.
            estimate: Returns bytes by part.
        """
        reported = set()
        for count in mesh.num_microbatches:
            plain = Candidate(mesh.dp, mesh.tp, mesh.pp, "", count, ep=mesh.ep, cp=mesh.cp)
            try:
                base = self._layout(mesh, batch, count, trace)
                reason = "tp shards no layer of this model" if mesh.tp > 1 and not base.styles else ""
            except UsageError as error:
                reason = str(error)
            if not reason:
                yield from self._evaluated(plain, base, estimate)
            elif reason not in reported:
                reported.add(reason)
                yield replace(plain, reason=reason)

    def _layout(self, mesh: CandidateMesh, batch: int, num_microbatches: int, trace: ModelTrace) -> ParallelLayout:
        return ParallelLayout(
            replace(self.source, batch=batch),
            mesh.axes,
            self._strategies(mesh.pp, mesh.dp * mesh.ep * mesh.cp)[0],
            mixed_precision=self.dtype,
            wrap=self.wrap if mesh.pp == 1 else None,
            schedule=self.schedule,
            num_microbatches=num_microbatches if mesh.pp > 1 else None,
            optimizer=self.optimizer,
            known_trace=trace,
        )

    def _strategies(self, pp: int, num_sharers: int) -> Sequence[str]:
        """Strategies to try; a single data rank shards nothing."""
        if pp > 1:
            return ("shard_grad_op",)
        return self.strategies if num_sharers > 1 else ("full_shard",)

    def _evaluated(self, plain: Candidate, base: ParallelLayout, estimate: MemoryEstimator) -> Iterator[Candidate]:
        for activation_checkpointing in (False, True):
            plan: SchedulePlan | None = None
            for strategy in self._strategies(plain.pp, plain.num_sharers):
                if strategy == "optimizer_state" and (plain.ep > 1 or base.matrices):
                    continue  # `plan.memory` refuses it
                layout = replace(base, strategy=strategy, activation_checkpointing=activation_checkpointing)
                traffic = traffic_of(layout, self.links)
                if layout.stages is not None and plan is None:
                    plan = pipeline_schedule(layout, traffic, self.rates)
                step = predict_step(layout, traffic, self.rates, self.overlap, plan=plan)
                one = replace(plain, strategy=strategy, activation_checkpointing=activation_checkpointing)
                yield one.with_result(estimate(layout), step.total_s, self.limit)

    def notes(self, num_gpus: int, limits: AxisLimits) -> Iterator[str]:
        """Yield the assumptions behind the numbers."""
        computed = "the model's own dtype" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        yield f"rates ({self.rates.source}): {format_flops(self.rates.flops_per_s)}; computed in {computed}"
        card = CARDS.get(self.links.lower()) if isinstance(self.links, str) else None
        if card is not None:
            yield (
                f"hosts of {card.gpus_per_host} GPUs with {card.nvlink} at {FITTED.nvlink:.0%}, and one port of "
                f"{card.port} per GPU at {FITTED.network:.0%}"
            )
        else:
            links = resolve_links(self.links, dict.fromkeys(("dp", "tp", "pp", *limits.shared), num_gpus))
            axes: dict[str, list[str]] = {}
            for axis, link in links.items():
                axes.setdefault(str(link), []).append(axis)
            for text, names in axes.items():
                yield f"{', '.join(names)}: {text}"
        if is_muon(self.optimizer):
            yield NOTE
        if "ep" in limits.shared:
            yield "every expert gets as many tokens; ranks along ep also have different samples"
        yield f"pipelines run {self.schedule.value}; their stages use shard_grad_op"
        yield ZERO_2
        yield (
            "memory is an estimate with 5 % allowance for fragmentation; simulate=1 simulates the best layout, "
            "plan.memory simulates any"
        )


def _limits(traces: TraceInterpolator, samples: int, num_gpus: int, most: dict[str, int | None]) -> AxisLimits:
    """Return the sizes that a model allows: ``ep`` with experts, ``cp`` with attention over a sequence.

    Args:
        traces: Traces of the model.
        samples: Per step over all ranks.
        num_gpus: Ranks.
        most: Largest number of ranks along each axis, as in `search`.
    """
    trace = traces.at(samples // math.gcd(samples, num_gpus))
    experts = set(subject.stacked_experts(trace.model).values())
    positions = traces.source.positions if trace.attention else 0
    most_cp = positions // MIN_POSITIONS if most["cp"] is None else most["cp"]
    return AxisLimits(
        most["tp"] or num_gpus,
        tuple(divisors(math.gcd(num_gpus, *experts), most["ep"] or num_gpus)) if experts else (1,),
        tuple(divisors(math.gcd(num_gpus, positions), max(1, most_cp))) if positions else (1,),
    )
