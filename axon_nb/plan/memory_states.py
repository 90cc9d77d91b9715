"""Model states of ranks by formula, and the plan that is made of nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from axon_nb.plan.errors import PlanError
from axon_nb.plan.memory_record import MODEL_STATES_ONLY, MemoryParts, MemoryPlan, RankMemory
from axon_nb.plan.memory_request import OFFLOADED, MemoryRequest

if TYPE_CHECKING:
    from axon_nb.parallel.optimizer_state import OptimizerKind

__all__ = ["StatesOfRanks", "by_formula"]

_NOTE = "Model states only, by formula: no activations, no buffers, so a training step takes more than this."


class StatesOfRanks:
    """Parameters, gradients and optimizer states of each rank, by formula.

    Args:
        request: What is asked.
        shapes: By the place along the axis pp: shape, dtype and whether it is trained, of each parameter of a rank
            before it is sharded over samples.
        optimizer: Whose states.
    """

    def __init__(self, request: MemoryRequest, shapes: Mapping[int, Sequence[Any]], optimizer: OptimizerKind) -> None:
        self._request = request
        self._shapes = shapes
        self._optimizer = optimizer
        dealt = request.strategy == "optimizer_state" and request.size("pp") == 1
        self._owned = self._dealt() if dealt else None
        self._found: dict[tuple[int, int], MemoryParts] = {}

    def asked(self) -> Sequence[int]:
        """The ranks that the request asks for; for the worst one, those of which it is one."""
        given = self._request.ranks
        if given == "worst":
            return self._worst()
        return range(self._request.world) if given == "all" else [int(rank) for rank in given]

    def of(self, rank: int) -> MemoryParts:
        """The states of one rank, wherever they are kept."""
        place = self._request.coordinates(rank)
        key = place.get("pp", 0), place.get("shard", place.get("dp", 0))
        if key not in self._found:
            self._found[key] = self._computed(*key)
        return self._found[key]

    def on_device(self, rank: int) -> MemoryParts:
        """The states of one rank, without those in another memory than the device's."""
        away = OFFLOADED[self._request.offload] if self._request.device == "cuda" else ()
        return replace(self.of(rank), **dict.fromkeys(away, 0))

    def host_bytes(self, rank: int) -> int:
        """What offloading keeps in the host's memory."""
        return sum(getattr(self.of(rank), part) for part in OFFLOADED[self._request.offload])

    def _dealt(self) -> list[set[int]]:
        from axon_nb.parallel.memory import partition_parameters

        return partition_parameters([math.prod(shape) for shape, _, _ in self._shapes[0]], self._request.size("dp"))

    def _computed(self, stage: int, sharer: int) -> MemoryParts:
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
            cpu_offload=CPUOffload(request.offload),
            owned=None if self._owned is None else self._owned[sharer],
            device_type=request.device,
        )
        return MemoryParts(stats.param_memory_bytes, stats.grad_memory_bytes, stats.optim_memory_bytes)

    def _worst(self) -> list[int]:
        size = self._request.size
        if self._owned is None or size("pp") > 1:
            # The first of those that share a copy: no other has more.
            return [stage * (self._request.world // size("pp")) for stage in range(size("pp"))]
        loads = [sum(math.prod(self._shapes[0][number][0]) for number in owned) for owned in self._owned]
        return [loads.index(max(loads)) * size("tp")]


def by_formula(request: MemoryRequest) -> MemoryPlan:
    """A plan of model states alone, made in this process, without running anything.

    Raises:
        PlanError: layers or stages are cut, which has no formula; the model cannot be made without data.
    """
    if request.size("tp", "pp") > 1:
        raise PlanError("closed_form with tp or pp: which layers are cut is known once it is tried; method='simulate'.")
    import torch

    from axon_nb.plan.simulate_model import question_of, tried_optimizer

    with torch.device("meta"):
        model = question_of(request).model()
    shapes = [(tuple(p.shape), p.dtype, p.requires_grad) for p in model.parameters()]
    states = StatesOfRanks(request, {0: shapes}, tried_optimizer(request))
    ranks = tuple(
        RankMemory(rank, request.coordinates(rank), parts, parts, host_bytes=states.host_bytes(rank))
        for rank in states.asked()
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
        (_NOTE,),
    )
