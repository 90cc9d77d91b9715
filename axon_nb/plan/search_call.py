"""`plan.search`: which layouts of a world fit, and which of them is the fastest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.schedule import PipelineSchedule
from axon_nb.plan.asked_numbers import check_callable, check_callbacks, check_int, check_number
from axon_nb.plan.capture_named import model_by_name
from axon_nb.plan.communication_call import traffic_of
from axon_nb.plan.communication_layout import ParallelLayout
from axon_nb.plan.communication_table import format_flops
from axon_nb.plan.links import Link
from axon_nb.plan.links_presets import resolve_links
from axon_nb.plan.mesh_axes import SINGLE_AXIS_STRATEGIES, check_choice
from axon_nb.plan.rates_presets import resolve_rates
from axon_nb.plan.schedule_plan import SchedulePlan
from axon_nb.plan.search_layouts import Mesh, meshes
from axon_nb.plan.search_memory import MemoryEstimator, estimate_memory
from axon_nb.plan.search_plan import Candidate, SearchPlan
from axon_nb.plan.search_simulate import Simulations
from axon_nb.plan.search_traces import TraceInterpolator
from axon_nb.plan.step_time_call import predicted
from axon_nb.plan.step_time_compute import pipeline_schedule
from axon_nb.plan.step_time_model import ModelSource, resolve_dtype, resolve_optimizer
from axon_nb.plan.step_time_trace import ModelTrace
from axon_nb.plan.step_time_work import Rates
from axon_nb.records.quantity import format_bytes

__all__ = ["search"]

_GIB = 1024.0**3
_NODE = 8
"""GPUs that NVLink joins, as far as defaults are concerned."""


def search(
    model: Any,
    num_gpus: int,
    memory: float,
    *,
    rates: Rates | float | str | Any = None,
    links: Link | str | Mapping[str, Link | str] | Any = None,
    batch: int | None = None,
    seq: int | None = None,
    inputs: Any = None,
    target: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Callable[..., Optimizer] | str = "AdamW",
    mixed_precision: torch.dtype | str | None = None,
    strategies: Sequence[Any] | str = ("ddp", "shard_grad_op", "full_shard"),
    schedule: PipelineSchedule | str = PipelineSchedule.ONE_F_ONE_B,
    max_tp: int = _NODE,
    overlap: float = 1.0,
    simulate: int = 0,
    progress: Callable[[float, str], None] | None = None,
    cancel: threading.Event | None = None,
    estimate: MemoryEstimator = estimate_memory,
) -> SearchPlan:
    """Layouts (dp, tp, pp, strategy, microbatches, recomputing) of some GPUs, those that fit and the fastest first.

        plan.search(GPTConfig(hidden=4096, heads=32, blocks=32, context=2048, vocab=50304), 64, 80)
        plan.search(make, 16, 40, batch=256, inputs=TensorSpec(("batch", 3, 224, 224)), rates="a100",
                    links={"tp": "nvlink3", "all": "ib-hdr"}, mixed_precision="bfloat16", simulate=1)

    The model takes two or three steps on tensors without data; all else is arithmetic.

    Args:
        model: As in `communication`; a pipeline is looked at where the model is a Sequential, and ``tp`` as
            `parallelize` cuts it by itself.
        num_gpus: Number of ranks; all are used.
        memory: GiB that each has.
        rates: As in `step_time`; None: those of an H100, in TF32 without `mixed_precision`.
        links: As in `communication`, of the axes ``dp``, ``tp`` and ``pp``; None: NVLink 4 along ``tp`` and among up to
            8 GPUs, InfiniBand NDR else.
        batch: Samples of a step over all ranks, which the data axis divides; None: two a GPU.
        seq: Tokens of a sample.
        inputs: What the model is called with, described so that ``"batch"`` stands for a rank's samples:
            ``TensorSpec(("batch", 1024))``; not needed with a GPTConfig.
        target: The same, for the loss.
        loss: From output and target, or from the output alone.
        optimizer: Made from parameters, or the name of one of torch's.
        mixed_precision: dtype of forward and backward, as in `FSDP`; of ``ddp`` that of autocast.
        strategies: Of the data axis, or one of them; a pipeline's stages are sharded by shard_grad_op.
        schedule: Of pipelines.
        max_tp: Ranks along ``tp`` at most, such as those of a node.
        overlap: As in `step_time`.
        simulate: So many of the best are simulated by `memory`, until those at the top are known to fit: some seconds
            each, in a process of its own. 0: all memory is estimated.
        progress: Called with the share done, 0 to 1, and what is done next, while layouts are simulated.
        cancel: Ends the simulation when it is set.
        estimate: Bytes by part that the fullest rank of a layout needs.

    Raises:
        UsageError: the numbers make no sense, or the model cannot be traced.
        SimulatorError: the simulator's process failed.
        PlanCancelledError: `cancel` was set.
    """
    _check(num_gpus, memory, batch, overlap, seq=seq, max_tp=max_tp, simulate=simulate)
    check_callable("loss", loss, "of the output, and of the target where there is one, to a number")
    check_callbacks(progress, cancel)
    samples = 2 * num_gpus if batch is None else batch
    kinds, dtype = _strategies(strategies), resolve_dtype(mixed_precision)
    model = model_by_name(model)
    given = ModelSource(model, inputs, target, loss, seq=seq)
    make = resolve_optimizer(optimizer)
    chosen = resolve_rates(("h100-tf32" if dtype is None else "h100") if rates is None else rates)
    wires = ({"all": "nvlink4" if num_gpus <= _NODE else "ib-ndr", "tp": "nvlink4"}) if links is None else links
    ask = _Ask(given, make, dtype, PipelineSchedule.of(schedule), kinds, chosen, wires, overlap, memory * _GIB)
    traces = TraceInterpolator(given, make, dtype)
    found: list[Candidate] = []
    for mesh in meshes(int(num_gpus), int(samples), max_tp=max_tp):
        if mesh.reason:
            found.append(Candidate(mesh.dp, mesh.tp, mesh.pp, reason=mesh.reason))
        else:
            found += ask.candidates(mesh, samples // mesh.dp, traces.at(samples // mesh.dp), estimate)
    each = f"{memory:g} GiB" if memory >= 1 else format_bytes(round(memory * _GIB))
    plan = SearchPlan(
        f"{num_gpus} GPUs of {each}, {samples} samples a step",
        tuple(sorted(found, key=lambda one: one.sort_key)),
        tuple(ask.notes(int(num_gpus))),
        int(samples),
    )
    if not simulate:
        return plan
    options = {"seq": seq, "inputs": inputs, "target": target, "loss": loss, "optimizer": optimizer}
    options |= {"mixed_precision": mixed_precision, "schedule": ask.schedule.value}
    return Simulations(model, options, memory * _GIB, progress, cancel).simulate_best(plan, simulate)


def _check(num_gpus: Any, memory: Any, batch: Any, overlap: Any, **whole: Any) -> None:
    check_int("num_gpus", num_gpus, what="ranks")
    check_number("memory", memory, rule="how many GiB a rank has, above 0, such as 80", least=1e-9)
    if batch is not None:
        check_int("batch", batch, what="samples over all ranks")
    check_number("overlap", overlap, rule="a share, from 0 (nothing passes behind computation) to 1", most=1.0)
    for name, given in whole.items():
        if given is not None or name != "seq":
            check_int(name, given, least=0 if name == "simulate" else 1)


def _strategies(given: Sequence[Any] | str) -> Sequence[str]:
    names = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not names:
        raise UsageError(f"strategies={given!r}: one or more of {', '.join(SINGLE_AXIS_STRATEGIES)}.")
    return [
        check_choice("strategies", str(getattr(name, "value", name)).lower(), SINGLE_AXIS_STRATEGIES) for name in names
    ]


@dataclass(frozen=True)
class _Ask:
    """What all layouts have in common."""

    given: ModelSource
    optimizer: Callable[..., Optimizer] | None
    dtype: torch.dtype | None
    schedule: PipelineSchedule
    strategies: Sequence[str]
    rates: Rates
    links: Any
    overlap: float
    limit: float
    """Bytes of a rank."""

    def candidates(self, mesh: Mesh, batch: int, trace: ModelTrace, estimate: MemoryEstimator) -> Iterator[Candidate]:
        """All layouts on one mesh, judged.

        Args:
            mesh: Ranks by axis.
            batch: Samples of a rank.
            trace: With that batch.
            estimate: Bytes by part.
        """
        said = set()
        for count in mesh.num_microbatches:
            plain = Candidate(mesh.dp, mesh.tp, mesh.pp, "", count)
            try:
                base = self._layout(mesh, batch, count, trace)
                reason = "tp cuts nothing of this model" if mesh.tp > 1 and not base.styles else ""
            except UsageError as error:
                reason = str(error)
            if not reason:
                yield from self._judged(plain, base, estimate)
            elif reason not in said:
                said.add(reason)
                yield replace(plain, reason=reason)

    def _layout(self, mesh: Mesh, batch: int, num_microbatches: int, trace: ModelTrace) -> ParallelLayout:
        return ParallelLayout(
            replace(self.given, batch=batch),
            mesh.axes,
            self._of(mesh.pp, mesh.dp)[0],
            mixed_precision=self.dtype,
            schedule=self.schedule,
            num_microbatches=num_microbatches if mesh.pp > 1 else None,
            optimizer=self.optimizer,
            known_trace=trace,
        )

    def _of(self, pp: int, dp: int) -> Sequence[str]:
        """Strategies worth a look; one data rank shards nothing."""
        if pp > 1:
            return ("shard_grad_op",)
        return self.strategies if dp > 1 else ("full_shard",)

    def _judged(self, plain: Candidate, base: ParallelLayout, estimate: MemoryEstimator) -> Iterator[Candidate]:
        for activation_checkpointing in (False, True):
            plan: SchedulePlan | None = None
            for strategy in self._of(plain.pp, plain.dp):
                layout = replace(base, strategy=strategy, activation_checkpointing=activation_checkpointing)
                traffic = traffic_of(layout, self.links)
                if layout.stages is not None and plan is None:
                    plan = pipeline_schedule(layout, traffic, self.rates)
                step = predicted(layout, traffic, self.rates, self.overlap, plan=plan)
                one = replace(plain, strategy=strategy, activation_checkpointing=activation_checkpointing)
                yield one.judged(estimate(layout), step.total_s, self.limit)

    def notes(self, num_gpus: int) -> Iterator[str]:
        """What the numbers rest on."""
        computed = "as the model is made" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        yield f"rates ({self.rates.source}): {format_flops(self.rates.flops_per_s)}; computed in {computed}"
        links = resolve_links(self.links, dict.fromkeys(("dp", "tp", "pp"), num_gpus))
        axes: dict[str, list[str]] = {}
        for axis, link in links.items():
            axes.setdefault(str(link), []).append(axis)
        for text, names in axes.items():
            yield f"{', '.join(names)}: {text}"
        yield f"pipelines run {self.schedule.value}, and their stages are sharded by shard_grad_op"
        yield (
            "memory is an estimate, with an allowance of 5 % for fragmentation; plan.memory simulates a layout, "
            "simulate=1 the best ones"
        )
