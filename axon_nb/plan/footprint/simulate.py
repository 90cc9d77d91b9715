"""Plans memory by simulation: runs a step of the ranks that differ and collects their peaks.

Runs in a process of its own. Models of many equal blocks are extrapolated from two depths; memory by module is that of
the full model, even if the model that ran lacks most blocks.
"""

from __future__ import annotations

import gc
import logging
import math
import re
import resource
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.utils._pytree import tree_leaves

from axon_nb.parallel.data.units import describe_units, make_units
from axon_nb.parallel.memory import OptimizerKind
from axon_nb.plan.arguments import STAGE_UNITS, UNSHARDED, ZERO_2
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint import question
from axon_nb.plan.footprint.fake_world import GLOO_COPIES, Key, Moment, StepLog, StorageLog, fake_tensors, fake_world
from axon_nb.plan.footprint.plan import (
    OFFLOADED,
    PARTS,
    MemoryParts,
    MemoryPlan,
    MemoryRequest,
    ModuleMemory,
    RankMemory,
)
from axon_nb.plan.footprint.training import (
    RankMeshes,
    Shape,
    Training,
    local_shapes,
    make_training,
    shard_layers,
    stages_on_rank,
)
from axon_nb.plan.muon import NOTE, matrix_names
from axon_nb.plan.process import fork_map
from axon_nb.plan.repetition import BlockRun, ProvenRuns
from axon_nb.plan.tracing.subject import checked_module_filter
from axon_nb.records.ranks import format_ranks

Report = Callable[[float, str], None]
DEPTHS = (4, 5)
"""Depths of the two versions that run: FSDP holds up to three units at once, at either end."""
ENDS = 2
"""Number of groups of blocks at either end whose moments are distinguished."""


class _ModelSummary(Struct, frozen=True):
    """What is known of the model before anything runs."""

    name: str
    num_parameters: int
    shapes: dict[tuple[bool, bool], dict[int, list[Shape]]]
    """A rank's parameters with sharded layers, before data ranks shard them, as `ModelStates` takes them."""
    optimizers: dict[bool, OptimizerKind]
    """As `ModelStates` takes them."""
    run: BlockRun | None
    """Equal blocks of which most can be left out."""
    reason: str
    """Why none can be left out, although there are many; empty: there are few, or extrapolation is off."""
    is_tensor_parallel: bool
    """Whether tp shards any layer."""
    units: str
    """Its FSDP units, and how to choose others; empty: there are none."""


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
    setup = question.training_setup(request)
    summary = _summarize(setup)
    states = question.ModelStates(request, summary.shapes, summary.optimizers)
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
    ranks = [_with_allowance(request, rank, by_kind[kinds[rank]][0]) for rank in requested]
    if request.ranks == "worst":
        ranks = [max(ranks, key=lambda item: item.peak.total)]
    report(1.0, "done")
    return MemoryPlan(
        summary.name,
        summary.num_parameters,
        dict(request.mesh),
        request.strategy,
        request.device,
        next(iter(by_kind.values()))[1],
        tuple(ranks),
        tuple(states.on_device(item.rank) for item in ranks),
        _notes(request, summary),
        simulator_bytes=_peak_resident_bytes(),
    )


def _summarize(setup: question.TrainingSetup) -> _ModelSummary:
    request = setup.request
    with fake_world(0, request.world_size):
        meshes = RankMeshes.of(request)
        with fake_tensors():
            model = setup.model()
            units = _units(request, model)
            run, reason = _proven_run(setup, model) if request.extrapolate and meshes.stages is None else (None, "")
            experts = question.expert_parameters(model, request)
            optimizers = question.checked_optimizers(request)
            names = matrix_names(model) if True in optimizers else ()
            num_parameters = sum(p.numel() * (request.size("ep") if p in experts else 1) for p in model.parameters())
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise PlanError(f"{type(model).__name__} has no trainable parameters, so there is no step to plan.")
            with question.explain_failure("sharded", "check that tp_plan= fits the model's layers"):
                shard_layers(setup, model, meshes)
            parts: dict[int, list[nn.Module]] = {0: [model]}
            if meshes.stages is not None:
                places = range(request.size("pp"))
                parts = {place: list(stages_on_rank(request, model, place).values()) for place in places}
            matrices = {parameter for name, parameter in model.named_parameters() if name in names}
            kinds = {p: (p in experts, p in matrices) for p in model.parameters()}
            shapes = {
                kind: {place: local_shapes(modules, kinds, kind) for place, modules in parts.items()}
                for kind in set(kinds.values())
            }
            held = sum(math.prod(shape) for kind in shapes for place in shapes[kind].values() for shape, _, _ in place)
            whole = sum(p.numel() for p in model.parameters())
            return _ModelSummary(
                type(model).__name__, num_parameters, shapes, optimizers, run, reason, held < whole, units
            )


def _units(request: MemoryRequest, model: nn.Module) -> str:
    """Describe the FSDP units of a model that is sharded in this way."""
    if request.strategy in UNSHARDED or request.is_unwrapped:
        return ""
    if request.size("pp") > 1:
        return STAGE_UNITS if request.num_sharers > 1 else ""
    return describe_units(make_units(model, checked_module_filter(model, request.wrap, "wrap")))


def _proven_run(setup: question.TrainingSetup, model: nn.Module) -> tuple[BlockRun | None, str]:
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


def _simulate_rank(
    setup: question.TrainingSetup, summary: _ModelSummary, states: question.ModelStates, rank: int
) -> tuple[RankMemory, str]:
    """Return a rank's memory, and how it was found."""
    if summary.run is not None:
        extrapolated = _extrapolate_rank(setup, summary.run, states, rank)
        if extrapolated is not None:
            return extrapolated
    one = run_step(setup, rank)
    peak = max(one.step.peaks(moment_key(None, 0)).values(), key=lambda moment: moment.parts.total)
    rows = module_rows(one.modules, peak.activations)
    return _at_peak(one.step.between_steps().parts, peak, one.host_bytes, rows), "simulated"


def _at_peak(persistent: MemoryParts, peak: Moment, host: int, modules: tuple[ModuleMemory, ...]) -> RankMemory:
    return RankMemory(0, {}, persistent, peak.parts, peak.phase, peak.module, host, modules)


def _extrapolate_rank(
    setup: question.TrainingSetup, run: BlockRun, states: question.ModelStates, rank: int
) -> tuple[RankMemory, str] | None:
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
    how = f"simulated with {DEPTHS[0]} and {DEPTHS[1]} of {run}, scaled to all"
    return _at_peak(parts, peak, host, rows), how


def _peak_resident_bytes() -> int:
    # Not `ru_maxrss` on Linux: it starts at the parent process's value.
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if match is None else int(match[1]) * 1024


def _with_allowance(request: MemoryRequest, rank: int, found: RankMemory) -> RankMemory:
    persistent, peak = (parts.with_allowance(request.fragmentation) for parts in (found.persistent, found.peak))
    return replace(found, rank=rank, coordinates=request.coordinates(rank), persistent=persistent, peak=peak)


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
    if True in summary.optimizers:
        notes.append(f"{NOTE}.")
    if request.size("ep") > 1:
        notes.append("Every expert gets as many tokens; buffers in which tokens travel are not included.")
    if request.size("cp") > 1:
        notes.append("Buffers of other ranks' keys and values are not included.")
    if request.size("tp") > 1 and not summary.is_tensor_parallel:
        notes.append("tp shards no layer of this model, so all tp ranks do the same work; give tp_plan=.")
    if request.device == "cuda":
        notes.append("Operations are those of CPUs; GPU kernels may need extra workspaces.")
    if request.fragmentation:
        notes.append(
            f"The fragmentation allowance is {request.fragmentation:.0%} of everything else; it is not a prediction."
        )
    return tuple(notes)


class StepRun(Struct, frozen=True):
    """The logged step of one rank."""

    step: StepLog
    modules: dict[str, tuple[int, int, int]]
    """Bytes of parameters, gradients and optimizer states of each module, without submodules."""

    @property
    def host_bytes(self) -> int:
        """Bytes that offloading keeps in host memory between steps."""
        return sum(self.step.bytes_of(role) for role in self.step.offloaded)


def run_step(setup: question.TrainingSetup, rank: int, run: BlockRun | None = None, depth: int = 0) -> StepRun:
    """Build a rank's model, create its optimizer states, and log one step.

    Args:
        setup: What to run.
        rank: The rank of the world.
        run: Blocks of which only `depth` groups are made; None: all.
        depth: Number of groups.

    Raises:
        PlanError: the model cannot be built or run without data.
    """
    request = setup.request
    with fake_world(rank, request.world_size):
        meshes = RankMeshes.of(request)
        with fake_tensors(), StorageLog(GLOO_COPIES if request.device == "cpu" else None) as log:
            training = make_training(setup, setup.model(run, depth), meshes)
            log.follow(training.model)
            with question.explain_failure("run", "check that inputs=, target= and loss= fit the model"):
                training.make_states()
                gc.collect()
                return _logged(training, log, request)


def _logged(training: Training, log: StorageLog, request: MemoryRequest) -> StepRun:
    parameters = list(training.model.parameters())
    log.mark("other", [*training.model.buffers(), *training.scalar_states()])
    log.mark("parameters", parameters)
    log.mark("optimizer", training.states())
    log.mark("activations", [item for item in tree_leaves(training.inputs) if isinstance(item, torch.Tensor)])
    log.mark_rest("communication")
    log.begin()
    training.compute(log.enter_phase)
    log.mark("gradients", [parameter.grad for parameter in parameters if parameter.grad is not None])
    log.enter_phase("optimizer")
    training.optimizer.step()
    log.mark("parameters", parameters)  # offloaded ones were moved and returned
    log.mark("optimizer", training.states())
    step = StepLog(
        dict(log.start),
        tuple(log.changes),
        dict(log.roles),
        dict(log.makers),
        offloaded=OFFLOADED[request.cpu_offload],
        own_memory=request.device == "cuda",
    )
    return StepRun(step, training.modules())


def moment_key(run: BlockRun | None, depth: int) -> Any:
    """Return a function that names moments so that moments of different depths correspond.

    Args:
        run: The blocks; None: all moments of a phase share one name.
        depth: Number of groups present.

    Returns:
        A stateful function from phase and module, called in time order, to a `Key`.
    """
    period = 1 if run is None else run.period
    places = {} if run is None else _places(run, depth)
    phase_now, block_now, seen = "", -1, False

    def key(phase: str, module: str) -> Key:
        nonlocal phase_now, block_now, seen
        if phase != phase_now:
            phase_now, block_now, seen = phase, -1, False
        block = _block_of(module, places)
        if block is not None:
            block_now, seen = block, True
        elif module and seen:
            block_now = -1
        if block_now < 0:
            return phase, "after" if seen else "before", 0
        is_first = block_now < ENDS * period
        return (phase, "first", block_now) if is_first else (phase, "last", depth * period - block_now)

    return key


def _places(run: BlockRun, depth: int) -> dict[str, int]:
    """Number the blocks of a version of `depth` groups."""
    return {name: number for number, name in enumerate(run.names[: depth * run.period])}


def _block_of(module: str, places: dict[str, int]) -> int | None:
    while module:
        if module in places:
            return places[module]
        module = module.rpartition(".")[0]
    return None


def extrapolate_peak(
    short: dict[Key, Moment], long: dict[Key, Moment], run: BlockRun, *, optimizer: int | None = None
) -> Moment | None:
    """Return the peak of the full model, extrapolated from two shorter versions.

    The bytes held at corresponding moments are linear in the number of blocks. Between the first and the last blocks
    they are linear in the block too, so the highest moment is at an end.

    Args:
        short: Moments of the version with fewer blocks.
        long: Moments of the other version.
        run: The blocks of the full model.
        optimizer: Bytes of the optimizer states, if known; None: extrapolate them as well.

    Returns:
        The peak; None if the two versions have different moments.
    """
    if short.keys() - long.keys():
        return None
    moments = [
        Moment(
            extrapolate_parts(short[key].parts, long[key].parts, run.depth, optimizer=optimizer),
            long[key].phase,
            full_model_name(long[key].module, run, DEPTHS[1]),
            _outside_activations(short[key], long[key], run),
        )
        for key in short
    ]
    return max(moments, key=lambda moment: moment.parts.total)


def _outside_activations(short: Moment, long: Moment, run: BlockRun) -> dict[str, int]:
    """Activations by module; those that modules outside the blocks make between blocks grow with their number."""
    inside = _places(run, run.depth)
    activations = dict(long.activations)
    for name, size in long.activations.items():
        if _block_of(name, inside) is None:
            activations[name] = _on_line(short.activations.get(name, 0), size, run.depth)
    return activations


def _on_line(first: int, second: int, depth: int) -> int:
    """Return the value at `depth` on the line through those at `DEPTHS`."""
    return round(first + (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0]) * (second - first))


def extrapolate_parts(
    short: MemoryParts, long: MemoryParts, depth: int, *, optimizer: int | None = None
) -> MemoryParts:
    """Return the parts at `depth`, on the line through those at `DEPTHS`; `optimizer` overrides its part."""
    values = {part: _on_line(getattr(short, part), getattr(long, part), depth) for part in PARTS}
    return MemoryParts(**values | ({} if optimizer is None else {"optimizer": optimizer}))


def full_model_name(module: str, run: BlockRun, depth: int) -> str:
    """Return the full model's name of a module in a version of `depth` groups, which keeps the last blocks last."""
    number = _block_of(module, _places(run, depth))
    if number is None or number < ENDS * run.period:
        return module
    return run.names[len(run.names) - depth * run.period + number] + module[len(run.names[number]) :]


def module_rows(
    states: Mapping[str, tuple[int, int, int]],
    activations: Mapping[str, int],
    run: BlockRun | None = None,
    depth: int = 0,
) -> tuple[ModuleMemory, ...]:
    """Return a row for each module with any memory.

    Args:
        states: Bytes of parameters, gradients and optimizer states by module.
        activations: Bytes alive at the peak, by the module that made them.
        run: The equal blocks of the full model; None: `states` has all of them.
        depth: Number of groups in `states`.
    """
    rows = [
        ModuleMemory(name, *states.get(name, (0, 0, 0)), activations.get(name, 0))
        for name in dict.fromkeys([*states, *activations])
    ]
    rows = [row for row in rows if row.parameters or row.activations]
    if run is None:
        return tuple(rows)
    places = _places(run, depth)
    blocks: list[list[ModuleMemory]] = [[] for _ in places]
    before: list[ModuleMemory] = []
    after: list[ModuleMemory] = []
    for row in rows:
        number = _block_of(row.name, places)
        if number is not None:
            blocks[number].append(row)
        else:
            (after if any(blocks) else before).append(row)
    repeated = [row for number in range(len(run.names)) for row in _block_rows(blocks, run, depth, number)]
    return (*before, *repeated, *after)


def _block_rows(blocks: list[list[ModuleMemory]], run: BlockRun, depth: int, number: int) -> list[ModuleMemory]:
    """The rows of one block of the full model, copied from an end block or from one in between."""
    from_end, ends = len(run.names) - number, ENDS * run.period
    between = ends + number % run.period
    source = number if number < ends else depth * run.period - from_end if from_end <= ends else between
    old, new = run.names[source], run.names[number]
    return [replace(row, name=new + row.name[len(old) :]) for row in blocks[source]]
