"""What a resize cannot carry over: named with the reason and the fix, before anything is changed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.engine.elastic import fsdp
from axon_nb.engine.elastic.meshes import is_world_mesh
from axon_nb.engine.elastic.sharded_states import fsdp_models, sharded_optimizers, zero_optimizers
from axon_nb.engine.elastic.zero import is_zero
from axon_nb.engine.live_objects import live_objects, objects_of, with_subclasses
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import is_dtensor, is_sharded, is_stage, loaded_class, unreplicated_reason
from axon_nb.records.hooks import missing_hooks

_FIX = "Save a checkpoint, delete it with `del {name}`, resize, then recreate it and load the checkpoint"
_FSDP = ("torch.distributed.fsdp", "FSDPModule")
_UNNAMED = "assign it to a variable, so that its shards can be found"


def find(new_size: int) -> dict[str, str]:
    """Return, by name, why variables of this rank cannot be carried over to `new_size` ranks, and the fix.

    FSDP2 models that a forward has left unsharded are sharded again.
    """
    reasons = {}
    for name, value in user_variables(current().kernel.shell).items():
        reason = ""
        with contextlib.suppress(Exception):  # an odd object of the user must not prevent a resize
            reason = _reason(value)
        if reason:
            reasons[name] = f"{reason}. {_FIX.format(name=name)}"
    if not reasons and dict(_unnamed()):
        current().snapshots.forget_cells()  # they keep alive what a cell has deleted; a resize drops them anyway
        reasons = dict(_unnamed())
    if not reasons:
        for model in fsdp_models().values():
            for state in fsdp.states_of(model):
                for module in state._modules:
                    module.reshard()
    return reasons


def _reason(value: Any) -> str:
    if is_stage(value):
        return "is a pipeline stage, which no other rank holds"
    if isinstance(value, torch.nn.Module):
        return _reason_of_model(value)
    if is_zero(value):
        if absent := missing_hooks("elastic.zero"):
            return f"cannot change its ranks: this torch lacks {absent[0]}"
        if value._overlap_with_ddp or value.process_group is not dist.group.WORLD:
            return "overlaps with DDP, or belongs to a part of the ranks"
        return ""
    if isinstance(value, torch.optim.Optimizer):
        return ""  # as its parameters
    return "is sharded over ranks" if is_sharded(value) else ""


def _reason_of_model(model: torch.nn.Module) -> str:
    size = current().config.world_size
    managed: set[int] = set()
    for _, group, record in fsdp.parameters(model):
        managed.add(id(record.sharded_param))
        info, after = group.mesh_info, group.post_forward_mesh_info
        if not is_world_mesh(info.mesh, size) or (after is not None and after is not info):
            return "is sharded over a part of the ranks, or over a mesh with several axes"
        if record.is_dtensor:
            return "is sharded by tensor parallelism as well"
    if managed and (absent := missing_hooks("elastic.fsdp2")):
        return f"cannot change its ranks: this torch lacks {absent[0]}"
    for module in model.modules():
        offload = getattr(module, "cpu_offload", None)
        if getattr(offload, "name", "NONE") != "NONE":
            return "is offloaded to the host"
        if is_stage(module):
            return "contains a pipeline stage"
        if getattr(module, "shard_dims", {}):
            return "has tensor-parallel layers"
    others = [parameter for parameter in model.parameters() if id(parameter) not in managed]
    if managed and not any(is_dtensor(parameter) for parameter in others):
        return ""
    return unreplicated_reason(others)


def _unnamed() -> Iterator[tuple[str, str]]:
    """Yield what is sharded and in no variable."""
    gc.collect()  # wrappers are in cycles of references
    known = {id(module) for model in fsdp_models().values() for module in model.modules()}
    (modules,) = live_objects(_FSDP)
    for module in modules:
        if id(module) not in known:
            yield type(module).__name__, f"is sharded and in no variable: {_UNNAMED}"
    named = {id(optimizer) for optimizer in (*sharded_optimizers().values(), *zero_optimizers().values())}
    named |= {id(optimizer.optim) for optimizer in zero_optimizers().values()}
    zero = loaded_class("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    for optimizer in objects_of(set(with_subclasses(torch.optim.Optimizer))):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        is_split = isinstance(optimizer, zero) or any(is_dtensor(parameter) for parameter in parameters)
        if is_split and id(optimizer) not in named:
            yield type(optimizer).__name__, f"has sharded states and is in no variable: {_UNNAMED}"
