"""What is split over ranks, and which parts of it certain ranks alone hold."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from axon_nb.engine.live_objects import living
from axon_nb.engine.namespace import users_variables
from axon_nb.engine.session import current
from axon_nb.records.protocol.recovery import HeldAlone

__all__ = [
    "apart_in_wrappers",
    "held_alone",
    "is_dtensor",
    "is_sharded",
    "is_stage",
    "loaded",
    "local_part",
    "mesh_type",
    "placement_in_words",
    "why_apart",
]


_STAGE = ("torch.distributed.pipelining.stage", "_PipelineStageBase")
_PIPELINE = ("axon_nb.parallel.pipeline.held_stages", "HeldStages")
_THREE_D = ("axon_nb.parallel.three_d", "Parallel3D")
_FSDP1 = ("torch.distributed.fsdp", "FullyShardedDataParallel")
_SPLIT = "is split over ranks"


class _Absent:
    """No object is an instance of it."""


def loaded(module: str, name: str) -> type:
    """A class of a module that need not be imported."""
    found: type = getattr(sys.modules.get(module), name, _Absent)
    return found


def mesh_type() -> type:
    """Torch's DeviceMesh."""
    return loaded("torch.distributed.device_mesh", "DeviceMesh")


def is_dtensor(value: Any) -> bool:
    """Whether the value is a distributed tensor."""
    return isinstance(value, _dtensor_type())


def _dtensor_type() -> Any:
    return loaded("torch.distributed.tensor", "DTensor")


def is_sharded(obj: Any) -> bool:
    """Whether the object is a distributed tensor, or a module that FSDP has taken apart."""
    kinds = (
        _dtensor_type(),
        loaded("torch.distributed.fsdp", "FSDPModule"),
        loaded(*_FSDP1),
    )
    return issubclass(type(obj), kinds)


def is_stage(obj: Any) -> bool:
    """Whether the object is one stage of a pipeline, or holds this rank's stages of one."""
    return issubclass(type(obj), (loaded(*_STAGE), loaded(*_PIPELINE), loaded(*_THREE_D)))


def placement_in_words(placement: Any) -> str:
    """Such as ``Shard(0)``, ``Partial(sum)``, ``Replicate()``."""
    if (dim := getattr(placement, "dim", None)) is not None:  # a strided shard is one for the reader
        return f"Shard({dim})"
    if placement.is_partial():
        return f"Partial({placement.reduce_op})"
    return "Replicate()" if placement.is_replicate() else str(placement)


def local_part(tensor: Any) -> torch.Tensor:
    """What this rank holds of the tensor."""
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, _dtensor_type()) else tensor.data
    return found


def apart_in_wrappers() -> dict[int, str]:
    """Why the parameters of FSDP1 modules and of pipeline stages are no copies of other ranks' ones, by their `id`."""
    modules, stages, pipelines = living(_FSDP1, _STAGE, _PIPELINE)
    held = [*(stage.submod for stage in stages), *(pipeline.module for pipeline in pipelines)]
    found = {id(parameter): "is a stage of a pipeline" for module in held for parameter in module.parameters()}
    return found | {id(parameter): _SPLIT for module in modules for parameter in module.parameters()}


def why_apart(tensors: Iterable[Any], in_wrappers: Mapping[int, str] | None = None) -> str:
    """Why these tensors are no copies of other ranks' ones, to be read after a name; empty: nothing tells that.

    Args:
        tensors: Parameters, usually.
        in_wrappers: From `apart_in_wrappers`, for who asks several times; None: found here.
    """
    known = {id(tensor): tensor for tensor in tensors}
    flat = loaded("torch.distributed.fsdp._flat_param", "FlatParameter")
    for tensor in known.values():
        if isinstance(tensor, flat):
            return _SPLIT
        if isinstance(tensor, _dtensor_type()) and not all(place.is_replicate() for place in tensor.placements):
            return _SPLIT
    wrapped = apart_in_wrappers() if in_wrappers is None else in_wrappers
    return next((wrapped[tensor] for tensor in known if tensor in wrapped), "")


def held_alone(ranks: Iterable[int]) -> list[HeldAlone]:
    """The variables of this rank whose parts on `ranks` no other rank holds."""
    chosen = frozenset(ranks)
    found, within = [], set[int]()
    for name, value in users_variables(current().kernel.shell).items():
        told = None
        with contextlib.suppress(Exception):  # an odd object of the user must not stand in the way of a repair
            told = _look(name, value, chosen)
        if told is not None:
            found.append((value, told))
            if isinstance(value, torch.nn.Module):
                within |= {id(module) for module in value.modules() if module is not value}
    seen = set[int]()
    records = []
    for value, record in found:
        if id(value) not in within and id(value) not in seen:  # a part of another variable, or a second name
            seen.add(id(value))
            records.append(record)
    return records


def _look(name: str, value: Any, ranks: frozenset[int]) -> HeldAlone | None:
    if is_stage(value):
        mine = {index for index, rank in _stages(value) if rank in ranks}
        return HeldAlone(name, "stage", tuple(sorted(mine)), value.num_stages, 0) if mine else None
    if isinstance(value, torch.nn.Module):
        kind, tensors = "module", [*value.parameters(), *value.buffers()]
    elif isinstance(value, torch.optim.Optimizer):
        kind, tensors = "optimizer", list(_tensors(value.state))
    elif isinstance(value, _dtensor_type()):
        kind, tensors = "tensor", [value]
    else:
        return None
    sizes = [_lost_bytes(tensor, ranks) for tensor in tensors]
    lost = [size for size in sizes if size is not None]
    return HeldAlone(name, kind, len(lost), len(tensors), sum(lost)) if lost else None


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for entry in state.values():
        if isinstance(entry, torch.Tensor):
            yield entry
        elif isinstance(entry, dict):
            yield from _tensors(entry)


def _lost_bytes(tensor: Any, ranks: frozenset[int]) -> int | None:
    """Bytes of the parts that only `ranks` hold; None when each part is elsewhere too."""
    if not isinstance(tensor, _dtensor_type()):
        return None
    mesh, placements = tensor.device_mesh.mesh, tensor.placements
    lost: set[tuple[int, ...]] = set()
    split = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    if not split:
        return None
    for rank in ranks:
        for place in (mesh == rank).nonzero().tolist():
            holders = mesh
            for axis in sorted(split, reverse=True):
                holders = holders.select(axis, place[axis])
            if set(holders.flatten().tolist()) <= ranks:
                lost.add(tuple(place[axis] for axis in split))
    if not lost:
        return None
    return sum(_part_bytes(tensor, split, part) for part in lost)


def _part_bytes(tensor: Any, split: list[int], part: tuple[int, ...]) -> int:
    shape = list(tensor.shape)
    for axis, index in zip(split, part, strict=True):
        dim, count = tensor.placements[axis].dim, tensor.device_mesh.size(axis)
        chunk = -(-shape[dim] // count)  # as torch.chunk splits
        shape[dim] = max(0, min(chunk, shape[dim] - index * chunk))
    return int(math.prod(shape) * tensor.element_size())


def _stages(stage: Any) -> list[tuple[int, int]]:
    """(stage, global rank) of all stages of its pipeline."""
    if hasattr(stage, "stage_ranks"):
        return list(stage.stage_ranks().items())
    ranks = torch.distributed.get_process_group_ranks(stage.group)
    return [(index, ranks[group_rank]) for index, group_rank in stage.stage_index_to_group_rank.items()]
