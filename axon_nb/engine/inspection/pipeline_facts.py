"""What this rank tells a planner of a pipeline: how it is laid out over ranks, and its stages without their data.

No rank has the whole model: each sends its stages, and the notebook puts them together.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from axon_nb.engine.inspection.last_call import called_with
from axon_nb.engine.inspection.model_skeleton import skeleton
from axon_nb.engine.sharding.sharded import is_dtensor, loaded
from axon_nb.records.memory import MemorySetup

__all__ = ["first_stage", "held_stages", "pipeline_facts", "stages_sent"]

_PIPELINE = ("axon_nb.parallel.pipeline.held_stages", "HeldStages")
_THREE_D = ("axon_nb.parallel.three_d", "Parallel3D")
_SECTION = ("axon_nb.parallel.pipeline.stages", "Section")
_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row", "SequenceParallel": "sequence"}
"""Names that `axon_nb.parallel.parallelize` has for torch's styles."""
_WRAPPED = "Stages are wrapped by hand: what is asked here is of stages that are whole on their rank."
_OTHER_STYLES = "Layers are cut in ways that have no name: what is asked here cuts those that are known to be cut well."
_CUT_ANEW = "Stages are cut anew, by the number of parameters."


def held_stages(module: Any) -> Any:
    """The `Pipeline` that a module is, or has within it; None: it has none."""
    own: Any = module
    if issubclass(type(own), loaded(*_THREE_D)):
        own = own.pipeline
    return own if issubclass(type(own), loaded(*_PIPELINE)) else None


def first_stage(module: Any) -> nn.Module | None:
    """What is called with a pipeline's inputs; None: it is on another rank, or this is no pipeline."""
    pipeline = held_stages(module)
    return None if pipeline is None else pipeline._stage_modules.get(0)


def pipeline_facts(module: Any, optimizer: str) -> tuple[MemorySetup, list[Any] | None, dict[str, Any], list[str]]:
    """How a pipeline is trained.

    Args:
        module: A `Pipeline` or `Parallel3D`; its first stage is on this rank.
        optimizer: As in `MemorySetup`.

    Returns:
        The setup; what the whole model is called with, None where no call was seen; ``schedule`` and ``tp_plan`` as
        `plan.memory` takes them; sentences.
    """
    pipeline, notes = held_stages(module), []
    sizes, options = {"dp": 1, "tp": 1}, dict[str, Any]()
    tp_plan: Any = "auto"
    if module is not pipeline:
        sizes, options = {axis: module._axis_size(axis) for axis in sizes}, module._fsdp
        named = {key: _STYLES.get(type(style).__name__) for key, style in module._plan.items()}
        tp_plan = "auto" if None in named.values() else named or "auto"
        notes += [_OTHER_STYLES] if None in named.values() else []
    elif _is_wrapped(pipeline):
        notes.append(_WRAPPED)
    policy = options.get("mp_policy")
    count = int(pipeline.num_microbatches)
    inputs = _whole(called_with(pipeline._stage_modules[0]), count)
    batch = next((value["shape"][0] for value in inputs or () if isinstance(value, dict) and value["shape"]), count)
    setup = MemorySetup(
        world=pipeline.group.size() * sizes["dp"] * sizes["tp"],
        strategy="full_shard" if options.get("reshard_after_forward", True) else "shard_grad_op",
        mixed_precision="" if policy is None else str(policy.param_dtype).removeprefix("torch."),
        optimizer=optimizer,
        batch=batch,
        pp=pipeline.group.size(),
        tp=sizes["tp"],
        microbatches=count,
    )
    return setup, inputs, {"schedule": pipeline.schedule.value, "tp_plan": tp_plan}, [*notes, _CUT_ANEW]


def _is_wrapped(pipeline: Any) -> bool:
    own = pipeline._stage_modules.values()
    return any(isinstance(stage, DistributedDataParallel) for stage in own) or any(
        map(is_dtensor, pipeline.parameters())
    )


def _whole(inputs: list[Any] | None, count: int) -> list[Any] | None:
    """What one microbatch was called with, for all of them."""
    if inputs is None:
        return None
    made = []
    for value in inputs:
        sized = isinstance(value, dict) and value["shape"]
        made.append({**value, "shape": [value["shape"][0] * count, *value["shape"][1:]]} if sized else value)
    return made


def stages_sent(module: Any) -> dict[int, bytes]:
    """By the number of each stage of this rank: what `join_stages` takes.

    Raises:
        NoSkeleton: a stage cannot be sent to another process.
    """
    pipeline = held_stages(module)
    found = {}
    for index, stage in pipeline._stage_modules.items():
        own: Any = stage.module if isinstance(stage, DistributedDataParallel) else stage
        is_section = issubclass(type(own), loaded(*_SECTION))
        children = own.named_children() if is_section else [(str(index), own)]
        found[index] = skeleton(nn.Sequential(OrderedDict(children)))
    return found
