"""Closed-form model states of ranks, and the plan made of them alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from axon_nb.plan.arguments import ZERO_2
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.parts import MemoryParts
from axon_nb.plan.footprint.plan import MODEL_STATES_ONLY, MemoryPlan, RankMemory
from axon_nb.plan.footprint.request import OFFLOADED, MemoryRequest

if TYPE_CHECKING:
    from axon_nb.parallel.optimizer_kind import OptimizerKind

_NOTE = "Model states only, by formula: no activations and no buffers, so a training step takes more than this."


class ModelStates:
    """Closed-form parameters, gradients and optimizer states of each rank.

    Args:
        request: The request.
        shapes: Shape, dtype and requires_grad of each parameter of a rank before it is sharded over data ranks,
            by coordinate along pp.
        optimizer: The optimizer whose states are counted.
    """

    def __init__(self, request: MemoryRequest, shapes: Mapping[int, Sequence[Any]], optimizer: OptimizerKind) -> None:
        self._request = request
        self._shapes = shapes
        self._optimizer = optimizer
        is_partitioned = request.strategy == "optimizer_state" and request.size("pp") == 1
        self._owned = self._partition() if is_partitioned else None
        self._known: dict[tuple[int, int], MemoryParts] = {}

    def requested_ranks(self) -> Sequence[int]:
        """The requested ranks; for ``worst``, the candidates for it."""
        requested = self._request.ranks
        if requested == "worst":
            return self._worst()
        return range(self._request.world_size) if requested == "all" else [int(rank) for rank in requested]

    def of(self, rank: int) -> MemoryParts:
        """The states of one rank, on the device or on the host."""
        place = self._request.coordinates(rank)
        key = place.get("pp", 0), place.get("shard", place.get("dp", 0))
        if key not in self._known:
            self._known[key] = self._compute(*key)
        return self._known[key]

    def on_device(self, rank: int) -> MemoryParts:
        """The states of one rank that are on its device."""
        on_host = OFFLOADED[self._request.cpu_offload] if self._request.device == "cuda" else ()
        return replace(self.of(rank), **dict.fromkeys(on_host, 0))

    def host_bytes(self, rank: int) -> int:
        """Bytes that offloading keeps in host memory."""
        return sum(getattr(self.of(rank), part) for part in OFFLOADED[self._request.cpu_offload])

    def _partition(self) -> list[set[int]]:
        from axon_nb.parallel.memory import partition_parameters

        return partition_parameters([math.prod(shape) for shape, _, _ in self._shapes[0]], self._request.size("dp"))

    def _compute(self, stage: int, sharer: int) -> MemoryParts:
        from axon_nb.parallel.memory import model_states
        from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy

        request = self._request
        stats = model_states(
            self._shapes[stage],
            ShardingStrategy("no_shard" if request.strategy == "ddp" else request.strategy),
            world_size=request.size("dp", "replicate", "shard"),
            shard_size=request.size("shard") if request.strategy == "hybrid_shard" else None,
            rank=sharer,
            optimizer=self._optimizer,
            cpu_offload=CPUOffload(request.cpu_offload),
            owned=None if self._owned is None else self._owned[sharer],
            device_type=request.device,
        )
        return MemoryParts(stats.param_memory_bytes, stats.grad_memory_bytes, stats.optim_memory_bytes)

    def _worst(self) -> list[int]:
        size = self._request.size
        if self._owned is None or size("pp") > 1:
            # The first rank of each shard group: no other has more.
            return [stage * (self._request.world_size // size("pp")) for stage in range(size("pp"))]
        loads = [sum(math.prod(self._shapes[0][number][0]) for number in owned) for owned in self._owned]
        return [loads.index(max(loads)) * size("tp")]


def closed_form_plan(request: MemoryRequest) -> MemoryPlan:
    """Return a plan of model states alone; computed in this process, without running the model.

    Raises:
        PlanError: the mesh has tp or pp, for which there is no formula, or the model cannot be built without data.
    """
    if request.size("tp", "pp") > 1:
        raise PlanError("method='closed_form' does not work with tp or pp: use method='simulate'.")
    import torch

    from axon_nb.plan.footprint.question import checked_optimizer, training_setup

    with torch.device("meta"):
        model = training_setup(request).model()
    shapes = [(tuple(p.shape), p.dtype, p.requires_grad) for p in model.parameters()]
    states = ModelStates(request, {0: shapes}, checked_optimizer(request))
    ranks = tuple(
        RankMemory(rank, request.coordinates(rank), parts, parts, host_bytes=states.host_bytes(rank))
        for rank in states.requested_ranks()
        for parts in (states.on_device(rank),)
    )
    return MemoryPlan(
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        dict(request.mesh),
        request.strategy,
        request.device,
        MODEL_STATES_ONLY,
        ranks,
        tuple(rank.persistent for rank in ranks),
        (_NOTE, f"{ZERO_2}.") if request.strategy == "shard_grad_op" else (_NOTE,),
    )
