"""Estimates the memory of a layout: model states by formula, the rest from a traced step.

Fast enough to rank hundreds of layouts; `axon_nb.plan.memory` simulates one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from axon_nb.parallel.memory import model_states
from axon_nb.parallel.optimizer_kind import OptimizerKind
from axon_nb.parallel.pipeline.schedule_analysis import PipelineMemoryStats
from axon_nb.parallel.strategies import ShardingStrategy
from axon_nb.plan.arguments import UNSHARDED
from axon_nb.plan.tracing.model_parts import owner
from axon_nb.plan.traffic.data_parallel import LocalTensor
from axon_nb.plan.traffic.layout import ParallelLayout

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

    Args:
        layout: The layout.
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
