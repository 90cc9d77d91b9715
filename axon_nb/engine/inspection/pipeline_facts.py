"""Describes a pipeline for the planner: its layout over ranks, and its stages without their data.

No rank holds the whole model: each sends its stages, and the notebook assembles them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from axon_nb.engine.inspection.last_call import CallRecorder
from axon_nb.engine.sharding.sharded import is_dtensor, loaded_class
from axon_nb.plan.skeleton import capture
from axon_nb.records.memory import MemorySetup

_PIPELINE = ("axon_nb.parallel.pipeline.held_stages", "HeldStages")
_THREE_D = ("axon_nb.parallel.three_d", "Parallel3D")
_SECTION = ("axon_nb.parallel.pipeline.stages", "Section")
_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row", "SequenceParallel": "sequence"}
"""Names that `axon_nb.parallel.parallelize` uses for torch's styles."""
_HAND_WRAPPED = "The stages are wrapped by hand; the prediction assumes unsharded stages."
_UNKNOWN_STYLES = "Some layers use unknown sharding styles; the prediction uses the default styles of `parallelize`."
_REPARTITIONED = "The prediction splits the model into stages by their numbers of parameters."


def find_pipeline(module: Any) -> Any:
    """The `Pipeline` that this module is or contains; None if there is none."""
    inner: Any = module
    if issubclass(type(inner), loaded_class(*_THREE_D)):
        inner = inner.pipeline
    return inner if issubclass(type(inner), loaded_class(*_PIPELINE)) else None


def first_stage(module: Any) -> nn.Module | None:
    """The stage that receives a pipeline's inputs; None if it is on another rank, or if this is not a pipeline."""
    pipeline = find_pipeline(module)
    return None if pipeline is None else pipeline._stage_modules.get(0)


def pipeline_facts(
    module: Any, optimizer: str, calls: CallRecorder
) -> tuple[MemorySetup, list[Any] | None, dict[str, Any], list[str]]:
    """Describe how a pipeline is trained.

    Args:
        module: A `Pipeline` or `Parallel3D` whose first stage is on this rank.
        optimizer: The same as in `MemorySetup`.
        calls: How models were called.

    Returns:
        The setup; the inputs of the whole model, None if no call was recorded; ``schedule`` and ``tp_plan`` as
        `plan.memory` takes them; notes as sentences.
    """
    pipeline, notes = find_pipeline(module), []
    sizes, options = {"dp": 1, "tp": 1}, dict[str, Any]()
    tp_plan: Any = "auto"
    if module is not pipeline:
        sizes, options = {axis: module._axis_size(axis) for axis in sizes}, module._fsdp
        styles = {key: _STYLES.get(type(style).__name__) for key, style in module._plan.items()}
        tp_plan = "auto" if None in styles.values() else styles or "auto"
        notes += [_UNKNOWN_STYLES] if None in styles.values() else []
    elif _is_wrapped(pipeline):
        notes.append(_HAND_WRAPPED)
    policy = options.get("mp_policy")
    count = int(pipeline.num_microbatches)
    inputs = _full_batch(calls.inputs_of(pipeline._stage_modules[0]), count)
    batch = next((value["shape"][0] for value in inputs or () if isinstance(value, dict) and value["shape"]), count)
    setup = MemorySetup(
        world_size=pipeline.group.size() * sizes["dp"] * sizes["tp"],
        strategy="full_shard" if options.get("reshard_after_forward", True) else "shard_grad_op",
        mixed_precision="" if policy is None else str(policy.param_dtype).removeprefix("torch."),
        optimizer=optimizer,
        batch=batch,
        pp=pipeline.group.size(),
        tp=sizes["tp"],
        num_microbatches=count,
    )
    return setup, inputs, {"schedule": pipeline.schedule.value, "tp_plan": tp_plan}, [*notes, _REPARTITIONED]


def _is_wrapped(pipeline: Any) -> bool:
    stages = pipeline._stage_modules.values()
    is_ddp = any(isinstance(stage, DistributedDataParallel) for stage in stages)
    return is_ddp or any(map(is_dtensor, pipeline.parameters()))


def _full_batch(inputs: list[Any] | None, count: int) -> list[Any] | None:
    """Scale the inputs of one microbatch to the whole batch."""
    if inputs is None:
        return None
    full = []
    for value in inputs:
        sized = isinstance(value, dict) and value["shape"]
        full.append({**value, "shape": [value["shape"][0] * count, *value["shape"][1:]]} if sized else value)
    return full


def stage_skeletons(module: Any) -> dict[int, bytes]:
    """The skeletons of this rank's stages by stage number, as `join_stages` takes them.

    Raises:
        CaptureError: a stage cannot be sent to another process.
    """
    pipeline = find_pipeline(module)
    skeletons = {}
    for index, stage in pipeline._stage_modules.items():
        inner: Any = stage.module if isinstance(stage, DistributedDataParallel) else stage
        is_section = issubclass(type(inner), loaded_class(*_SECTION))
        children = inner.named_children() if is_section else [(str(index), inner)]
        skeletons[index] = capture(nn.Sequential(OrderedDict(children)), f"stage {index}", bare=True).factory
    return skeletons
