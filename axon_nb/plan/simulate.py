"""A plan of memory by simulation: which ranks are run, and what they say. Runs in a process of its own."""

from __future__ import annotations

import gc
import logging
import math
import re
import resource
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from axon_nb.plan.copies import together
from axon_nb.plan.errors import PlanError
from axon_nb.plan.memory_record import MemoryParts, MemoryPlan, ModuleMemory, RankMemory
from axon_nb.plan.memory_request import MemoryRequest
from axon_nb.plan.memory_states import ModelStates
from axon_nb.plan.simulate_depth import DEPTHS, Run, extrapolate_peak, find_block_run, line, moment_key
from axon_nb.plan.simulate_hooks import fake_world, fakes
from axon_nb.plan.simulate_model import TrainingSetup, checked_optimizer, explain_failure, training_setup
from axon_nb.plan.simulate_modules import module_rows
from axon_nb.plan.simulate_pipeline import stages_on_rank
from axon_nb.plan.simulate_replay import Moment
from axon_nb.plan.simulate_step import ran
from axon_nb.plan.simulate_training import RankMeshes, Shape, shapes_of, shard_layers
from axon_nb.records.ranks import format_ranks

__all__ = ["simulate"]

Report = Callable[[float, str], None]


@dataclass(frozen=True)
class _Whole:
    """What is known of the model before anything runs."""

    name: str
    num_parameters: int
    shapes: dict[int, list[Shape]]
    """By the place along pp: of a rank's parameters, its layers cut, before they are sharded over samples."""
    run: Run | None
    """Blocks of which most can be left out."""
    is_cut: bool
    """Whether a rank holds less of its layers than there is, where there is an axis tp; without one they are whole."""


@dataclass(frozen=True)
class _Found:
    """What one rank holds."""

    persistent: MemoryParts
    peak: Moment
    host_bytes: int
    modules: tuple[ModuleMemory, ...]
    how: str


def simulate(request: MemoryRequest, report: Report) -> MemoryPlan:
    """The plan of a request.

    Args:
        request: Checked.
        report: Told the share done and what is done next.

    Raises:
        PlanError: the model cannot be made or run without data, or cannot be taken apart so.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # on the model's part: nobody reads them here
    logging.disable(logging.WARNING)
    gc.disable()  # what is kept alive by cycles is looked for once, before the step
    gc.freeze()
    report(0.05, "making the model")
    question = training_setup(request)
    whole = _whole(question)
    states = ModelStates(request, whole.shapes, checked_optimizer(request))
    asked = states.asked()
    alike = {rank: (request.coordinates(rank).get("pp", 0), states.of(rank)) for rank in asked}
    firsts = {kind: rank for rank, kind in reversed(alike.items())}
    short = "" if whole.run is None else f" with {DEPTHS[0]} and {DEPTHS[1]} of {whole.run.depth} blocks"
    doing = f"a step of rank {format_ranks(firsts.values())}{short}"
    report(0.1, doing)
    found = together(
        [partial(_found, question, whole, states, rank) for rank in firsts.values()],
        tell=lambda done: report(0.1 + 0.85 * done / len(firsts), doing),
    )
    classes = dict(zip(firsts, found, strict=True))
    ranks = [_record(request, rank, classes[alike[rank]]) for rank in asked]
    if request.ranks == "worst":
        ranks = [max(ranks, key=lambda item: item.peak.total)]
    report(1.0, "done")
    return MemoryPlan(
        whole.name,
        whole.num_parameters,
        dict(request.mesh),
        request.strategy,
        request.device,
        next(iter(classes.values())).how,
        tuple(ranks),
        tuple(states.on_device(item.rank) for item in ranks),
        _notes(request, whole),
        simulator_bytes=_highest_resident(),
    )


def _whole(question: TrainingSetup) -> _Whole:
    request = question.request
    with fake_world(0, request.world_size):
        meshes = RankMeshes.of(request)
        with fakes():
            model = question.model()
            short = request.extrapolate and meshes.stages is None
            run = find_block_run(model, least=DEPTHS[1] + 1) if short else None
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise PlanError(
                    f"{type(model).__name__} has no parameters that are trained: there is no step to plan for."
                )
            with explain_failure("cut", "tp_plan= fits the model's layers"):
                shard_layers(question, model, meshes)
            if meshes.stages is None:
                shapes = {0: shapes_of([model])}
            else:
                places = range(request.size("pp"))
                shapes = {place: shapes_of(stages_on_rank(request, model, place).values()) for place in places}
            held = sum(math.prod(shape) for place in shapes.values() for shape, _, _ in place)
            return _Whole(type(model).__name__, num_parameters, shapes, run, held < num_parameters)


def _found(question: TrainingSetup, whole: _Whole, states: ModelStates, rank: int) -> _Found:
    if whole.run is not None:
        found = _extrapolated(question, whole.run, states, rank)
        if found is not None:
            return found
    one = ran(question, rank)
    peak = max(one.step.highest(moment_key(None, 0)).values(), key=lambda moment: moment.parts.total)
    rows = module_rows(one.modules, peak.activations)
    return _Found(one.step.between_steps().parts, peak, one.host_bytes, rows, "simulated")


def _extrapolated(question: TrainingSetup, run: Run, states: ModelStates, rank: int) -> _Found | None:
    """From two short versions of the model; None where they do not lie on a line with the whole."""
    both = together([partial(ran, question, rank, run, depth) for depth in DEPTHS])
    short, long = (one.step.highest(moment_key(run, depth)) for one, depth in zip(both, DEPTHS, strict=True))
    formula = states.on_device(rank)
    # States that are dealt out whole do not grow evenly with the number of blocks; they are there all the time.
    dealt = formula.optimizer if question.request.strategy == "optimizer_state" else None
    peak = extrapolate_peak(short, long, run, optimizer=dealt)
    first, second = (one.step.between_steps().parts for one in both)
    parts = line(first, second, run.depth, optimizer=dealt)
    if peak is None or (parts.parameters, parts.gradients, parts.optimizer) != (
        formula.parameters,
        formula.gradients,
        formula.optimizer,
    ):
        return None
    step = both[1].host_bytes - both[0].host_bytes
    host = both[0].host_bytes + step * (run.depth - DEPTHS[0]) // (DEPTHS[1] - DEPTHS[0])
    rows = module_rows(both[1].modules, peak.activations, run, DEPTHS[1])
    how = f"simulated with {DEPTHS[0]} and {DEPTHS[1]} of {run.depth} equal blocks, and extrapolated"
    return _Found(parts, peak, host, rows, how)


def _highest_resident() -> int:
    # Not `ru_maxrss` on Linux: it begins with that of the process which has started this one.
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if found is None else int(found[1]) * 1024


def _record(request: MemoryRequest, rank: int, found: _Found) -> RankMemory:
    share = request.fragmentation
    return RankMemory(
        rank,
        request.coordinates(rank),
        found.persistent.with_allowance(share),
        found.peak.parts.with_allowance(share),
        found.peak.phase,
        found.peak.module,
        found.host_bytes,
        found.modules,
    )


def _notes(request: MemoryRequest, whole: _Whole) -> tuple[str, ...]:
    samples = f"{request.batch} sample{'s' if request.batch > 1 else ''}"
    notes = [
        f"A step of {samples} a rank, on tensors without data; gradients are set to None between steps.",
        "Not in it: the libraries' own memory, such as CUDA's context and NCCL's buffers.",
    ]
    if request.size("tp") > 1 and not whole.is_cut:
        notes.append("tp cuts nothing of this model: every rank along it does the same; tp_plan= says what is cut.")
    if request.device == "cuda":
        notes.append("Operations are those of CPUs: kernels of a GPU may need workspaces besides.")
    if request.fragmentation:
        notes.append(f"The allowance for fragmentation is {request.fragmentation:.0%} of all else: no prediction.")
    return tuple(notes)
