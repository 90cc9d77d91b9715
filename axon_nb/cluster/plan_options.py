"""A question about memory in the words of `axon_nb.plan.memory`, and its answer in those of the panels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from axon_nb.records.by_name import HasClassName, LazyFunction
from axon_nb.records.memory_setup import MemorySetup
from axon_nb.records.what_if import MemoryPrediction

if TYPE_CHECKING:
    from axon_nb.plan import MemoryPlan

__all__ = ["plan_options", "read_plan"]

_ALL_RANKS = 8
"""Of so many ranks each is planned for; of more the one with the highest peak."""
_ROLES = {"other": "buffers"}


def plan_options(setup: MemorySetup, facts: Mapping[str, Any], spec: Any) -> dict[str, Any]:
    """The arguments of `plan.memory` besides the model; no object of torch's among them.

    Args:
        setup: What is asked.
        facts: What the rank has told of the model.
        spec: `axon_nb.plan.TensorSpec`.
    """
    inputs = [_input(value, facts["setup"]["batch"], spec) for value in facts["inputs"]]
    tokens = facts["loss"] == "tokens"
    optimizer, options = setup.optimizer_arguments
    if setup.optimizer == facts["setup"]["optimizer"]:
        options = facts["optimizer_options"]
    recomputed = HasClassName(tuple(facts["blocks"])) if facts["blocks"] else True
    return {
        "mesh": setup.mesh,
        "strategy": setup.strategy,
        "inputs": tuple(inputs),
        # Torch's schedules cut a target into microbatches, whatever the loss makes of it.
        "target": inputs[0] if tokens or setup.pp > 1 else None,
        "loss": LazyFunction("axon_nb.parallel.models", "next_byte_loss") if tokens else None,
        "optimizer": optimizer,
        "optimizer_options": options,
        "dtype": setup.dtype or None,
        "mixed_precision": setup.mixed_precision or None,
        "cpu_offload": setup.offload,
        "batch": setup.batch,
        "activation_checkpointing": recomputed if setup.checkpointing else None,
        "wrap": None if facts["units"] is None else HasClassName(tuple(facts["units"])),
        "num_microbatches": setup.microbatches if setup.pp > 1 else None,
        "schedule": facts["schedule"],
        "tp_plan": facts["tp_plan"],
        "device": facts["device"],
        "ranks": "all" if setup.world <= _ALL_RANKS else "worst",
    }


def _input(value: Any, batch: int, spec: Any) -> Any:
    if not isinstance(value, dict):
        return value
    first, *rest = value["shape"] or [None]
    shape = () if first is None else ("batch" if first == batch else first, *rest)
    return spec(shape, value["dtype"])


def read_plan(setup: MemorySetup, made: MemoryPlan, notes: tuple[str, ...]) -> MemoryPrediction:
    """A plan as panels show it.

    Args:
        setup: What was asked.
        made: The answer.
        notes: Sentences that come before those of the plan.
    """
    worst = made.worst
    return MemoryPrediction(
        setup,
        made.method,
        worst.rank,
        {own.rank: _by_role(own.persistent.as_dict()) for own in made.ranks},
        {own.rank: _by_role(own.peak.as_dict()) for own in made.ranks},
        f"in {worst.phase}" + (f" of {worst.module}" if worst.module else ""),
        worst.host_bytes,
        (*notes, *made.notes),
    )


def _by_role(parts: Mapping[str, int]) -> dict[str, int]:
    return {_ROLES.get(name, name): size for name, size in parts.items() if size}
