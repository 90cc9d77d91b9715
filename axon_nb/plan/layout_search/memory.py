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
from axon_nb.plan.traffic.data_parallel import LocalTensor
from axon_nb.plan.traffic.layout import ParallelLayout

__all__ = ["ALLOWANCE", "MemoryEstimator", "estimate_memory"]

MemoryEstimator = Callable[[ParallelLayout], dict[str, int]]
"""Returns bytes by part of the rank that needs most."""

ALLOWANCE = 0.05
"""Fragmentation allowance of CUDA's allocator, as a fraction of everything else; as in `axon_nb.plan.memory`."""


def estimate_memory(layout: ParallelLayout) -> dict[str, int]:
    """Estimate bytes by part of the rank along ``pp`` that needs most.

    - ``model states`` are exact (`axon_nb.parallel.memory`).
    - ``unsharded parameters``: the two largest units, which FSDP holds at once, or all if they stay unsharded until
      backward.
    - ``gradients``: the largest unit's before and during reduction; all gradients of pipeline stages, until the last
      microbatch; DDP's buckets.
    - ``activations``: what forward saves of a rank's batch; with activation checkpointing, the children's outputs and
      the largest child's activations. Divided by ``tp`` where it shards; a pipeline counts its live microbatches.
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
    if layout.strategy in ("ddp", "optimizer_state"):
        cast = sum(p.elements * layout.mixed_precision.itemsize for p in parameters) if layout.mixed_precision else 0
        return cast, sum(p.nbytes for p in parameters if p.has_grad) if num_ranks > 1 else 0
    if num_ranks == 1 and layout.mixed_precision is None:
        return 0, 0
    units: dict[str, int] = {}
    trained: dict[str, int] = {}
    reduced: dict[str, int] = {}
    for p in parameters:
        name, computed = p.name.partition(".")[0], (layout.mixed_precision or p.dtype).itemsize
        units[name] = units.get(name, 0) + p.elements * computed
        if p.has_grad:
            trained[name] = trained.get(name, 0) + p.elements * computed
            reduced[name] = reduced.get(name, 0) + p.elements * p.dtype.itemsize
    if layout.stages is not None:
        return sum(units.values()), sum(reduced.values())
    stays_unsharded = layout.strategy in ("shard_grad_op", "no_shard")
    largest = sorted(units.values(), reverse=True)
    return sum(largest if stays_unsharded else largest[:2]), max(trained.values(), default=0) + max(
        reduced.values(), default=0
    )


def _children(layout: ParallelLayout, pp_rank: int) -> list[str]:
    """The model's children on one rank along ``pp``; what is outside all children counts for the last one."""
    trace, stages = layout.trace, layout.stages
    names = ("", *(name for name, _ in trace.model.named_children()))
    if stages is None:
        return list(names)
    owner, last = stages.rank_of_child, stages.rank_of_stage[stages.num_stages - 1]
    return [name for name in names if owner.get(name, last) == pp_rank]


def _saved(layout: ParallelLayout) -> dict[str, int]:
    """Bytes that forward saves on one rank along ``tp``, by child.

    Tensors computed from a column layer's output are sharded until a row layer reduces them. With sequence parallelism
    the rest is sharded along the sequence, except what column layers have gathered (Korthikanti et al., 2022, section
    4.2).
    """
    found: dict[str, int] = {}
    styles = layout.styles
    for (keeper, sources), size in layout.trace.saved.items():
        is_sharded = any(styles.get(source) == "column" for source in sources)
        if layout.sequence and not is_sharded:
            is_sharded = any(source in styles for source in sources) and not styles.get(keeper, "").startswith("column")
        child = keeper.partition(".")[0]
        found[child] = found.get(child, 0) + (size // layout.size("tp") if is_sharded else size)
    return found


def _activations(layout: ParallelLayout, pp_rank: int) -> int:
    trace, stages = layout.trace, layout.stages
    children, each = _children(layout, pp_rank), _saved(layout)
    saved = {name: each.get(name, 0) for name in children}
    if layout.activation_checkpointing:
        kept = sum(sum(fact.nbytes for fact in trace.outputs.get(name, ())) for name in children if name)
        parts = kept + saved.get("", 0), max((size for name, size in saved.items() if name), default=0)
    else:
        parts = sum(saved.values()), 0
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
    largest = layout.trace.largest_outputs
    sizes = [
        largest.get(name, 0) // (layout.size("tp") if name in layout.sharded_children else 1)
        for name in _children(layout, pp_rank)
    ]
    return max(sizes, default=0) // (1 if layout.stages is None else layout.stages.num_microbatches)
