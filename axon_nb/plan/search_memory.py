"""About how much memory a rank of a layout needs: model states by formula, activations by what forward keeps.

For ranking many layouts at once; `axon_nb.plan.search` takes another estimate in its place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from axon_nb.parallel.memory import model_states
from axon_nb.parallel.optimizer_state import OptimizerKind
from axon_nb.parallel.strategies import ShardingStrategy
from axon_nb.plan.communication_data import Held
from axon_nb.plan.communication_layout import Layout
from axon_nb.plan.schedule_call import schedule

__all__ = ["MemoryEstimate", "estimated_memory"]

MemoryEstimate = Callable[[Layout], dict[str, int]]
"""Bytes by part, of the rank that needs most."""


def estimated_memory(layout: Layout) -> dict[str, int]:
    """Bytes by part: ``model states``, ``whole parameters``, ``activations``; of the fullest rank along ``pp``.

    Model states are exact (`axon_nb.parallel.memory`). Whole parameters are the two largest units that FSDP holds at
    once, or all where they stay whole until backward. Activations are what forward keeps of a rank's batch, or with
    recomputing the children's outputs and the largest child's own; those of children that ``tp`` cuts are divided by
    it, and of a pipeline as many microbatches are counted as are live at once.

    Args:
        layout: The layout.
    """
    held = layout.parameters
    places = range(layout.size("pp"))
    return max((_of_place(layout, held, place) for place in places), key=lambda parts: sum(parts.values()))


def _of_place(layout: Layout, held: list[Held], place: int) -> dict[str, int]:
    among = layout.stages.among if layout.stages is not None else None
    here = [h for h in held if among is None or among[h.name.partition(".")[0]] == place]
    ranks = layout.size(layout.data_axis)
    whole = layout.strategy == "ddp"
    states = model_states(
        [(h.shape, h.dtype, h.trained) for h in here],
        ShardingStrategy.NO_SHARD if whole else ShardingStrategy(layout.strategy),
        world_size=ranks,
        optimizer=OptimizerKind(layout.optimizer or torch.optim.AdamW),
    )
    units: dict[str, int] = {}
    for h in here:
        units[h.name.partition(".")[0]] = units.get(h.name.partition(".")[0], 0) + h.nbytes
    gathered = 0
    if not whole and layout.strategy != "optimizer_state" and ranks > 1:
        largest = sorted(units.values(), reverse=True)
        stay = layout.stages is not None or layout.strategy in ("shard_grad_op", "no_shard")
        gathered = sum(largest if stay else largest[:2])
    return {
        "model states": states.total_bytes,
        "whole parameters": gathered,
        "activations": _activations(layout, place),
    }


def _activations(layout: Layout, place: int) -> int:
    trace, stages, ways = layout.trace, layout.stages, layout.size("tp")
    cut = {name.partition(".")[0] for name in layout.styles}
    names = dict.fromkeys((*trace.saved, *(name for name, _ in trace.model.named_children())))
    children = [name for name in names if stages is None or stages.among.get(name, place) == place]
    saved = {name: trace.saved.get(name, 0) // (ways if name in cut else 1) for name in children}
    if layout.recompute:
        kept = sum(sum(fact.nbytes for fact in trace.outputs.get(name, ())) for name in children if name)
        parts = kept, max(saved.values(), default=0)
    else:
        parts = sum(saved.values()), 0
    if stages is None:
        return sum(parts)
    live = schedule(stages.schedule, stages.count, stages.microbatches, ranks=stages.ranks).peak_per_rank[place]
    count = len(stages.held(place)) * stages.microbatches
    return parts[0] * live // count + parts[1] // stages.microbatches
