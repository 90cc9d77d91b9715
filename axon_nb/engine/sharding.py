"""Tensors over ranks: what is sharded, where each part is, and which shards only certain ranks hold.

Parts are those of tensors on a mesh, and of parameters of axon_nb's tensor-parallel layers, which hold plain tensors.
Private hook: torch's computation of a DTensor's local shape and offset; without it, shards are assumed to be split
evenly, as by `torch.chunk`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from axon_nb.comm.placements import Placed, part_shape, placed
from axon_nb.engine.live_objects import FSDP, FSDP1, live_objects
from axon_nb.engine.session import current, user_variables
from axon_nb.records.protocol.recovery import LostShards
from axon_nb.records.telemetry import MeshInfo

_STAGE = ("torch.distributed.pipelining.stage", "_PipelineStageBase")
_PIPELINE = ("axon_nb.parallel.pipeline.stages", "HeldStages")
_THREE_D = ("axon_nb.parallel.three_d", "Parallel3D")
_SHARDED = "is sharded over ranks"
_LINEAR = "axon_nb.parallel.tensor.layers"
_BLOCK = ("axon_nb.parallel.tensor.layers", "TensorParallelBlock")
_NORM = ("axon_nb.parallel.tensor.layers", "SequenceParallelNorm")


class _Absent:
    """A class without instances."""


def loaded_class(module: str, name: str) -> type:
    """Return a class if its module is imported, otherwise a class without instances."""
    loaded: type = getattr(sys.modules.get(module), name, _Absent)
    return loaded


def device_mesh_type() -> type:
    """Return torch's DeviceMesh."""
    return loaded_class("torch.distributed.device_mesh", "DeviceMesh")


def is_dtensor(value: Any) -> bool:
    """Whether the value is a distributed tensor."""
    return isinstance(value, _dtensor_type())


def _dtensor_type() -> Any:
    return loaded_class("torch.distributed.tensor", "DTensor")


def is_sharded(obj: Any) -> bool:
    """Whether the object is a tensor that is laid out over ranks, or a module that FSDP has sharded."""
    kinds = (loaded_class(*FSDP), loaded_class(*FSDP1))
    if issubclass(type(obj), (*kinds, _dtensor_type())):
        return True
    found = placed(obj)
    return found is not None and not found.is_replicated


def is_stage(obj: Any) -> bool:
    """Whether the object is a pipeline stage, or holds this rank's stages of a pipeline."""
    return issubclass(type(obj), (loaded_class(*_STAGE), loaded_class(*_PIPELINE), loaded_class(*_THREE_D)))


def format_placement(placement: Any) -> str:
    """Format a placement, such as ``Shard(0)``, ``Partial(sum)``, ``Replicate()``."""
    if (dim := getattr(placement, "dim", None)) is not None:  # a strided shard, too
        return f"Shard({dim})"
    if placement.is_partial():
        return f"Partial({placement.reduce_op})"
    return "Replicate()" if placement.is_replicate() else str(placement)


def local_shard(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a distributed tensor, or the data of a plain one."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, _dtensor_type()) else tensor.data
    return local


def unreplicated_parameters() -> dict[int, str]:
    """Explain, by `id`, why parameters of FSDP1 modules and pipeline stages are not replicas of other ranks' ones."""
    fsdp1_modules, stages, pipelines = live_objects(FSDP1, _STAGE, _PIPELINE)
    stage_modules = [*(stage.submod for stage in stages), *(pipeline.module for pipeline in pipelines)]
    reasons = {id(p): "is a pipeline stage" for module in stage_modules for p in module.parameters()}
    return reasons | {id(p): _SHARDED for module in fsdp1_modules for p in module.parameters()}


def unreplicated_reason(tensors: Iterable[Any], in_wrappers: Mapping[int, str] | None = None) -> str:
    """Explain why these tensors are not replicas of other ranks' ones; empty if nothing indicates that.

    Args:
        tensors: Usually parameters.
        in_wrappers: What `unreplicated_parameters` returned, for repeated calls; None: call it here.

    Returns:
        A text that follows a name, such as ``is sharded over ranks``.
    """
    by_id = {id(tensor): tensor for tensor in tensors}
    flat = loaded_class("torch.distributed.fsdp._flat_param", "FlatParameter")
    for tensor in by_id.values():
        if isinstance(tensor, flat):
            return _SHARDED
        if (found := placed(tensor)) is not None and not found.is_replicated:
            return _SHARDED
    reasons = unreplicated_parameters() if in_wrappers is None else in_wrappers
    return next((reasons[key] for key in by_id if key in reasons), "")


def only_on_ranks(ranks: Iterable[int]) -> list[LostShards]:
    """List the variables of this rank with shards that only `ranks` hold."""
    targets = frozenset(ranks)
    lost, submodules = [], set[int]()
    for name, value in user_variables(current().kernel.shell).items():
        record = None
        with contextlib.suppress(Exception):  # an odd object of the user must not prevent a repair
            record = _lost_parts(name, value, targets)
        if record is not None:
            lost.append((value, record))
            if isinstance(value, torch.nn.Module):
                submodules |= {id(module) for module in value.modules() if module is not value}
    seen = set[int]()
    records = []
    for value, record in lost:
        if id(value) not in submodules and id(value) not in seen:  # not part of another variable, nor a second name
            seen.add(id(value))
            records.append(record)
    return records


def _lost_parts(name: str, value: Any, ranks: frozenset[int]) -> LostShards | None:
    if is_stage(value):
        indices = {index for index, rank in _stages(value) if rank in ranks}
        return LostShards(name, "stage", tuple(sorted(indices)), value.num_stages, 0) if indices else None
    if isinstance(value, torch.nn.Module):
        kind, tensors = "module", [placed(tensor) for tensor in (*value.parameters(), *value.buffers())]
    elif isinstance(value, torch.optim.Optimizer):
        kind, tensors = "optimizer", list(_placed_states(value))
    elif (found := placed(value)) is not None:
        kind, tensors = "tensor", [found]
    else:
        return None
    sizes = [_lost_bytes(tensor, ranks) for tensor in tensors]
    lost = [size for size in sizes if size is not None]
    return LostShards(name, kind, len(lost), len(tensors), sum(lost)) if lost else None


def _placed_states(optimizer: torch.optim.Optimizer) -> Iterator[Placed | None]:
    """Yield the layout of each state that is a tensor; one of a parameter's shape is laid out as the parameter."""
    for parameter, entry in optimizer.state.items():
        of_parameter = placed(parameter)
        for tensor in _tensors({parameter: entry}):
            same = of_parameter is not None and tensor.shape == parameter.shape
            yield placed(tensor) or (replace(of_parameter, local=tensor) if of_parameter and same else None)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for entry in state.values():
        if isinstance(entry, torch.Tensor):
            yield entry
        elif isinstance(entry, dict):
            yield from _tensors(entry)


def _lost_bytes(tensor: Placed | None, ranks: frozenset[int]) -> int | None:
    """Return the bytes of the shards that only `ranks` hold; None if every shard is also elsewhere."""
    if tensor is None:
        return None
    lost: set[tuple[int, ...]] = set()
    shard_axes = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
    if not shard_axes:
        return None
    for rank in ranks:
        for coordinates in (tensor.mesh.mesh == rank).nonzero().tolist():
            if set(ranks_at(tensor.mesh, shard_axes, coordinates)) <= ranks:
                lost.add(tuple(coordinates[axis] for axis in shard_axes))
    if not lost:
        return None
    return sum(_shard_bytes(tensor, shard_axes, indices) for indices in lost)


def _shard_bytes(tensor: Placed, shard_axes: list[int], indices: tuple[int, ...]) -> int:
    placements = [tensor.placements[axis] for axis in shard_axes]
    sizes = [tensor.mesh.size(axis) for axis in shard_axes]
    return math.prod(part_shape(tensor.shape, placements, sizes, indices)) * tensor.local.element_size()


def ranks_at(mesh: Any, axes: Iterable[int], coordinates: Sequence[int]) -> list[int]:
    """Return the ranks of a mesh that have these coordinates on some of its axes."""
    ranks = mesh.mesh
    for axis in sorted(axes, reverse=True):
        ranks = ranks.select(axis, coordinates[axis])
    return [int(rank) for rank in ranks.flatten().tolist()]


def _stages(stage: Any) -> list[tuple[int, int]]:
    """Return (stage, global rank) for all stages of its pipeline."""
    if hasattr(stage, "stage_ranks"):
        return list(stage.stage_ranks().items())
    ranks = torch.distributed.get_process_group_ranks(stage.group)
    return [(index, ranks[group_rank]) for index, group_rank in stage.stage_index_to_group_rank.items()]


def own_mesh(variables: Mapping[str, Any]) -> MeshInfo | None:
    """The mesh among the user's variables; None if there is none.

    If there are several: the one named ``mesh``, else the one with the most ranks, else with the most axes.
    """
    kind: Any = device_mesh_type()
    space = list(variables.items())  # a copy: a cell may be adding names
    meshes: dict[str, Any] = {
        name: value for name, value in space if isinstance(value, kind) and value.ndim and not name.startswith("_")
    }
    if not meshes:
        return None
    name = max(meshes, key=lambda key: (key == "mesh", meshes[key].mesh.numel(), meshes[key].mesh.ndim))
    mesh = meshes[name]
    axes = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.mesh.ndim))
    return MeshInfo(
        name=name,
        axes=tuple(axes),
        shape=tuple(int(size) for size in mesh.mesh.shape),
        ranks=tuple(int(rank) for rank in mesh.mesh.flatten().tolist()),
    )


class LayerSharding(Struct, frozen=True):
    """How a tensor-parallel layer shards one of its parameters."""

    group: Any
    """The ranks that share the layer: a group of `axon_nb.comm`."""
    dim: int | None
    """Dimension that is split into equal parts, in the order of the group's ranks; None: replicated."""


def layer_shardings(modules: Iterable[Any]) -> dict[int, LayerSharding]:
    """Return the sharding of parameters of tensor-parallel layers, by `id`; layers on a single rank are left out."""
    linear = (loaded_class(_LINEAR, "ColumnParallelLinear"), loaded_class(_LINEAR, "RowParallelLinear"))
    block, sequence_norm = loaded_class(*_BLOCK), loaded_class(*_NORM)
    shardings: dict[int, LayerSharding] = {}
    for module in modules:
        if issubclass(type(module), linear):
            dims = module.shard_dims
            parameters = dict(module.named_parameters(recurse=False))
            shardings |= {id(parameters[name]): LayerSharding(module.group, dims.get(name)) for name in parameters}
        elif issubclass(type(module), block):
            replicated = [parameter for norm in (module.norm_1, module.norm_2) for parameter in norm.parameters()]
            shardings |= {id(parameter): LayerSharding(module.attention.group, None) for parameter in replicated}
        elif issubclass(type(module), sequence_norm):
            shardings |= {
                id(parameter): LayerSharding(module.group, None) for parameter in module.parameters(recurse=False)
            }
    return {key: sharding for key, sharding in shardings.items() if sharding.group.size() > 1}


class ShardPlacement(Struct, frozen=True):
    """A tensor on a mesh, seen from one rank; the fields are those of `records.telemetry.Shard`."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    placements: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()
    padding: int = 0


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    found = placed(tensor)
    local: torch.Tensor = tensor if found is None else found.local
    return local


def placement_of(
    tensor: Any,
    *,
    group: Any = None,
    sharded: Any = None,
    layer: LayerSharding | None = None,
    like: Placed | None = None,
) -> ShardPlacement:
    """Return the placement of a tensor.

    Args:
        tensor: Any tensor.
        group: The process group over which a plain tensor is replicated.
        sharded: The DTensor whose unsharded form a plain tensor is.
        layer: How a tensor-parallel layer shards it; the other arguments describe the local part.
        like: How a parameter of the same shape is laid out, of which the tensor is a gradient or a state.
    """
    placement = _local_placement(tensor, group, sharded, like)
    return placement if layer is None else _within_layer(placement, layer)


def _local_placement(tensor: Any, group: Any, sharded: Any, like: Placed | None) -> ShardPlacement:
    if (found := placed(tensor) or like) is not None:
        return _on_mesh(found, found.placements, padded=True)
    if (found := placed(sharded)) is not None:
        from torch.distributed.tensor import Replicate  # loaded, as there is a DTensor; a rank starts without it

        return _on_mesh(found, [Replicate()] * found.mesh.ndim, padded=False)
    shape = tuple(tensor.shape)
    if group is not None:
        coordinates, size = (dist.get_rank(group),), (dist.get_world_size(group),)
        return ShardPlacement(shape, (0,) * len(shape), ("Replicate()",), ("replica",), size, coordinates)
    return ShardPlacement(shape, (0,) * len(shape))


def _within_layer(placement: ShardPlacement, layer: LayerSharding) -> ShardPlacement:
    """Extend the placement of a part by the axis over which its layer is sharded."""
    size, rank = layer.group.size(), layer.group.rank()
    shape, offset, text = list(placement.global_shape), list(placement.offset), "Replicate()"
    if layer.dim is not None:
        text = f"Shard({layer.dim})"
        offset[layer.dim] += rank * shape[layer.dim]
        shape[layer.dim] *= size
    return replace(
        placement,
        global_shape=tuple(shape),
        offset=tuple(offset),
        placements=(*placement.placements, text),
        axes=(*placement.axes, "tp"),
        mesh_shape=(*placement.mesh_shape, size),
        coordinates=(*placement.coordinates, rank),
    )


def _on_mesh(tensor: Placed, placements: Any, *, padded: bool) -> ShardPlacement:
    mesh = tensor.mesh
    offset = _offset(tensor, placements)
    names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    return ShardPlacement(
        tensor.shape,
        offset,
        tuple(format_placement(placement) for placement in placements),
        tuple(names),
        tuple(mesh.shape),
        tuple(mesh.get_coordinate() or ()),
        _padding(tensor, placements) if padded else 0,
    )


@functools.cache
def _offsets() -> Any:
    utils = importlib.import_module("torch.distributed.tensor._utils")
    return getattr(utils, "compute_local_shape_and_global_offset", None)


def _offset(tensor: Placed, placements: Any) -> tuple[int, ...]:
    mesh = tensor.mesh
    if (offsets := _offsets()) is not None:
        _, offset = offsets(torch.Size(tensor.shape), mesh, placements)
        return tuple(int(start) for start in offset)
    offset, shape, coordinates = [0] * len(tensor.shape), list(tensor.shape), mesh.get_coordinate() or ()
    for axis, placement in enumerate(placements):
        if (dim := getattr(placement, "dim", None)) is not None:
            chunk = math.ceil(shape[dim] / mesh.size(axis))
            start = min(chunk * coordinates[axis], shape[dim])
            offset[dim] += start
            shape[dim] = min(chunk, shape[dim] - start)
    return tuple(offset)


def _padding(tensor: Placed, placements: Any) -> int:
    """Return the bytes by which FSDP2 pads this shard to the size of the others; 0 if its storage has no such room."""
    local, shape, padding = tensor.local, list(tensor.shape), 0
    used = local.numel() * local.element_size()
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        shape[dim] = math.ceil(shape[dim] / tensor.mesh.size(axis))
        padding = math.prod(shape) * local.element_size() - used
    return padding if padding > 0 and local.untyped_storage().nbytes() == used + padding else 0
