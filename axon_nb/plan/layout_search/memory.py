"""The memory of layouts: estimated for all, then simulated for the best, all in one process.

The estimate has model states by formula and the rest from a traced step: fast enough to rank hundreds of layouts.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch

from axon_nb.errors import UsageError
from axon_nb.parallel.memory import OptimizerKind, ShardingStrategy, model_states
from axon_nb.parallel.pipeline.schedule import PipelineMemoryStats
from axon_nb.plan.arguments import UNSHARDED
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest
from axon_nb.plan.layout_search.plan import Candidate, SearchPlan
from axon_nb.plan.models import check_model, dtype_name
from axon_nb.plan.process import run_in_process
from axon_nb.plan.tracing.subject import owner
from axon_nb.plan.traffic.communication import ParallelLayout
from axon_nb.plan.traffic.parallelism import LocalTensor

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
      blocks, the largest block's activations, and what is outside. Divided by ``tp`` where it shards; a pipeline counts
      its live microbatches.
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
    kind: OptimizerKind = layout.trace.cached(("states of", make), lambda: _CachedOptimizerKind(make))
    is_replicated = layout.strategy == "ddp"
    states = model_states(
        [(p.shape, p.dtype, p.requires_grad) for p in parameters],
        ShardingStrategy.NO_SHARD if is_replicated else ShardingStrategy(layout.strategy),
        world_size=layout.size(layout.data_axis),
        optimizer=kind,
    )
    return states.total_bytes


def _unsharded(layout: ParallelLayout, parameters: Sequence[LocalTensor]) -> tuple[int, int]:
    """Bytes of unsharded parameters, and of their gradients on top of the model states."""
    num_ranks = layout.size(layout.data_axis)
    if layout.strategy in UNSHARDED:
        cast = sum(p.elements * layout.mixed_precision.itemsize for p in parameters) if layout.mixed_precision else 0
        return cast, sum(p.nbytes for p in parameters if p.has_grad) if num_ranks > 1 else 0
    if num_ranks == 1 and layout.mixed_precision is None:
        return 0, 0
    units: dict[str, int] = {}
    trained: dict[str, int] = {}
    reduced: dict[str, int] = {}
    for p in parameters:
        name, computed = owner(p.name, layout.units), (layout.mixed_precision or p.dtype).itemsize
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
    parts = sum(saved.values()), 0
    if layout.activation_checkpointing:
        inside: dict[str, int] = {}
        for keeper, size in saved.items():
            block = owner(keeper, trace.blocks)
            inside[block] = inside.get(block, 0) + size
        outside = inside.pop("", 0)
        # Each block's input, as large as its output, is all that is kept of it.
        kept = sum(sum(fact.nbytes for fact in trace.outputs.get(name, ())) for name in inside)
        parts = outside + kept, max(inside.values(), default=0)
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
        fact.nbytes // (layout.size("tp") if layout.divides_part(name) else 1)
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
