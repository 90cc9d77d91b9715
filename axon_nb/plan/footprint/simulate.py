"""Plans memory by simulation: runs the ranks that differ and collects their peaks. Runs in a process of its own."""

from __future__ import annotations

import gc
import logging
import math
import re
import resource
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from axon_nb.parallel.data.units import describe_units, make_units
from axon_nb.plan.arguments import STAGE_UNITS, UNSHARDED, ZERO_2
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.fake_world import fake_tensors, fake_world
from axon_nb.plan.footprint.formula import ModelStates
from axon_nb.plan.footprint.parts import MemoryParts, ModuleMemory
from axon_nb.plan.footprint.pipeline import stages_on_rank
from axon_nb.plan.footprint.plan import MemoryPlan, RankMemory
from axon_nb.plan.footprint.question import TrainingSetup, checked_optimizer, explain_failure, training_setup
from axon_nb.plan.footprint.repeated_blocks import (
    DEPTHS,
    extrapolate_parts,
    extrapolate_peak,
    module_rows,
    moment_key,
)
from axon_nb.plan.footprint.replay import Moment
from axon_nb.plan.footprint.request import MemoryRequest
from axon_nb.plan.footprint.step import run_step
from axon_nb.plan.footprint.training import RankMeshes, Shape, local_shapes, shard_layers
from axon_nb.plan.process.fork_map import fork_map
from axon_nb.plan.repetition.alike import BlockRun, ProvenRuns
from axon_nb.plan.tracing.subject import checked_module_filter
from axon_nb.records.ranks import format_ranks

Report = Callable[[float, str], None]


@dataclass(frozen=True)
class _ModelSummary:
    """What is known of the model before anything runs."""

    name: str
    num_parameters: int
    shapes: dict[int, list[Shape]]
    """By coordinate along pp: a rank's parameters with sharded layers, before data ranks shard them."""
    run: BlockRun | None
    """Equal blocks of which most can be left out."""
    reason: str
    """Why none can be left out, although there are many; empty: there are few, or extrapolation is off."""
    is_tensor_parallel: bool
    """Whether tp shards any layer."""
    units: str
    """Its FSDP units, and how to choose others; empty: there are none."""


@dataclass(frozen=True)
class _RankUsage:
    """Memory of one rank."""

    persistent: MemoryParts
    peak: Moment
    host_bytes: int
    modules: tuple[ModuleMemory, ...]
    how: str


def simulate(request: MemoryRequest, report: Report) -> MemoryPlan:
    """Plan a request.

    Args:
        request: Already checked.
        report: Called with the fraction done and the next step.

    Raises:
        PlanError: the model cannot be built, run or sharded without data.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the model's: nobody reads them here
    logging.disable(logging.WARNING)
    gc.disable()  # `run_step` collects cycles once, before the step
    gc.freeze()
    report(0.05, "building the model")
    setup = training_setup(request)
    summary = _summarize(setup)
    states = ModelStates(request, summary.shapes, checked_optimizer(request))
    requested = states.requested_ranks()
    kinds = {rank: (request.coordinates(rank).get("pp", 0), states.of(rank)) for rank in requested}
    firsts = {kind: rank for rank, kind in reversed(kinds.items())}
    short = "" if summary.run is None else f" with {DEPTHS[0]} and {DEPTHS[1]} of {summary.run}"
    doing = f"simulating a step of rank {format_ranks(firsts.values())}{short}"
    report(0.1, doing)
    usages = fork_map(
        [partial(_simulate_rank, setup, summary, states, rank) for rank in firsts.values()],
        progress=lambda done: report(0.1 + 0.85 * done / len(firsts), doing),
    )
    by_kind = dict(zip(firsts, usages, strict=True))
    ranks = [_record(request, rank, by_kind[kinds[rank]]) for rank in requested]
    if request.ranks == "worst":
        ranks = [max(ranks, key=lambda item: item.peak.total)]
    report(1.0, "done")
    return MemoryPlan(
        summary.name,
        summary.num_parameters,
        dict(request.mesh),
        request.strategy,
        request.device,
        next(iter(by_kind.values())).how,
        tuple(ranks),
        tuple(states.on_device(item.rank) for item in ranks),
        _notes(request, summary),
        simulator_bytes=_peak_resident_bytes(),
    )


def _summarize(setup: TrainingSetup) -> _ModelSummary:
    request = setup.request
    with fake_world(0, request.world_size):
        meshes = RankMeshes.of(request)
        with fake_tensors():
            model = setup.model()
            units = _units(request, model)
            run, reason = _proven_run(setup, model) if request.extrapolate and meshes.stages is None else (None, "")
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise PlanError(f"{type(model).__name__} has no trainable parameters, so there is no step to plan.")
            with explain_failure("sharded", "check that tp_plan= fits the model's layers"):
                shard_layers(setup, model, meshes)
            if meshes.stages is None:
                shapes = {0: local_shapes([model])}
            else:
                places = range(request.size("pp"))
                shapes = {place: local_shapes(stages_on_rank(request, model, place).values()) for place in places}
            held = sum(math.prod(shape) for place in shapes.values() for shape, _, _ in place)
            return _ModelSummary(
                type(model).__name__, num_parameters, shapes, run, reason, held < num_parameters, units
            )


def _units(request: MemoryRequest, model: nn.Module) -> str:
    """Describe the FSDP units of a model that is sharded in this way."""
    if request.strategy in UNSHARDED or request.is_unwrapped:
        return ""
    if request.size("pp") > 1:
        return STAGE_UNITS if request.size("dp") > 1 else ""
    return describe_units(make_units(model, checked_module_filter(model, request.wrap, "wrap")))


def _proven_run(setup: TrainingSetup, model: nn.Module) -> tuple[BlockRun | None, str]:
    """Return blocks that are proven alike, or why there are none although there are many."""
    request = setup.request
    units = set(map(id, make_units(model, checked_module_filter(model, request.wrap, "wrap"))))
    patterns = request.tp_plan if isinstance(request.tp_plan, Mapping) else {}
    names = {id(module): name for name, module in model.named_modules()}

    def wrapping(module: nn.Module) -> tuple[Any, ...]:
        styles = tuple(str(style) for pattern, style in patterns.items() if fnmatchcase(names[id(module)], pattern))
        return id(module) in units, styles

    args, target = setup.inputs(), setup.target()
    runs = ProvenRuns(model, lambda made: setup.loss(made(*args), target), wrapping)
    run = runs.find(least=DEPTHS[1] + 1, make=setup.model, depth=DEPTHS[1])
    return run, runs.reason


def _simulate_rank(setup: TrainingSetup, summary: _ModelSummary, states: ModelStates, rank: int) -> _RankUsage:
    if summary.run is not None:
        extrapolated = _extrapolate_rank(setup, summary.run, states, rank)
        if extrapolated is not None:
            return extrapolated
    one = run_step(setup, rank)
    peak = max(one.step.peaks(moment_key(None, 0)).values(), key=lambda moment: moment.parts.total)
    rows = module_rows(one.modules, peak.activations)
    return _RankUsage(one.step.between_steps().parts, peak, one.host_bytes, rows, "simulated")


def _extrapolate_rank(setup: TrainingSetup, run: BlockRun, states: ModelStates, rank: int) -> _RankUsage | None:
    """Extrapolate from two short versions of the model; None if they do not lie on a line with the full model."""
    try:
        both = fork_map([partial(run_step, setup, rank, run, depth) for depth in DEPTHS])
    except PlanError:
        return None  # a shorter model may not run
    short, long = (one.step.peaks(moment_key(run, depth)) for one, depth in zip(both, DEPTHS, strict=True))
    formula = states.on_device(rank)
    # ZeRO-1 assigns whole parameters to ranks, so its states are not linear in the number of blocks.
    partitioned = formula.optimizer if setup.request.strategy == "optimizer_state" else None
    peak = extrapolate_peak(short, long, run, optimizer=partitioned)
    first, second = (one.step.between_steps().parts for one in both)
    parts = extrapolate_parts(first, second, run.depth, optimizer=partitioned)
    if peak is None or (parts.parameters, parts.gradients, parts.optimizer) != (
        formula.parameters,
        formula.gradients,
        formula.optimizer,
    ):
        return None
    per_depth = both[1].host_bytes - both[0].host_bytes
    host = both[0].host_bytes + per_depth * (run.depth - DEPTHS[0]) // (DEPTHS[1] - DEPTHS[0])
    rows = module_rows(both[1].modules, peak.activations, run, DEPTHS[1])
    how = f"simulated with {DEPTHS[0]} and {DEPTHS[1]} of {run}, extrapolated"
    return _RankUsage(parts, peak, host, rows, how)


def _peak_resident_bytes() -> int:
    # Not `ru_maxrss` on Linux: it starts at the parent process's value.
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if match is None else int(match[1]) * 1024


def _record(request: MemoryRequest, rank: int, usage: _RankUsage) -> RankMemory:
    share = request.fragmentation
    return RankMemory(
        rank,
        request.coordinates(rank),
        usage.persistent.with_allowance(share),
        usage.peak.parts.with_allowance(share),
        usage.peak.phase,
        usage.peak.module,
        usage.host_bytes,
        usage.modules,
    )


def _notes(request: MemoryRequest, summary: _ModelSummary) -> tuple[str, ...]:
    samples = f"{request.batch} sample{'s' if request.batch > 1 else ''}"
    notes = [
        f"A step of {samples} per rank on tensors without data; gradients are set to None between steps.",
        "Not included: memory of libraries, such as the CUDA context and NCCL's buffers.",
    ]
    if request.strategy == "shard_grad_op":
        notes.append(f"{ZERO_2}.")
    if summary.units:
        notes.append(summary.units)
    if summary.reason:
        notes.append(f"All blocks were simulated: {summary.reason}, so none can stand for another.")
    if request.size("tp") > 1 and not summary.is_tensor_parallel:
        notes.append("tp shards no layer of this model, so all tp ranks do the same work; give tp_plan=.")
    if request.device == "cuda":
        notes.append("Operations are those of CPUs; GPU kernels may need extra workspaces.")
    if request.fragmentation:
        notes.append(
            f"The fragmentation allowance is {request.fragmentation:.0%} of everything else; it is not a prediction."
        )
    return tuple(notes)
