"""The pickle of a session for a replacement of this rank.

What is sharded stays so: the replacement has the same rank. It makes the same calls of `fully_shard`, and then gets the
shards that were there. Process groups and meshes become its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from axon_nb.comm.placements import declare_placements, placed
from axon_nb.engine.elastic import fsdp
from axon_nb.engine.elastic.pickling import placeholder, reduce
from axon_nb.engine.elastic.sharded_states import fsdp_models
from axon_nb.engine.groups import install
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import device_mesh_type, is_dtensor, is_sharded, loaded_class
from axon_nb.engine.transfer.namespace_pickle import NamespacePickler, raise_if_of_process
from axon_nb.engine.transfer.state_pickle import CannotCopyError, Place

_Split = tuple[Any, tuple[Any, ...]]
"""Mesh and placements of a DTensor."""
_Pieces = dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor | None]]
_Whole = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of the whole tensor."""


def structure_pickler(managed: Mapping[int, Any]) -> Callable[[Any, Callable[[torch.UntypedStorage], Place]], Any]:
    """Return the pickler for the same rank.

    Args:
        managed: By the `id` of each parameter that FSDP2 manages, mesh and placements of the DTensor that it was before
            `fully_shard`; None: a plain tensor.
    """
    return functools.partial(_Pickler, managed)


class _Pickler(NamespacePickler):
    def __init__(self, managed: Mapping[int, Any], file: Any, save: Callable[[torch.UntypedStorage], Place]) -> None:
        super().__init__(file, save)
        self._managed = managed

    def reduce_object(self, obj: Any, kind: type) -> Any:
        """See `StatePickler`."""
        if id(obj) in self._managed:
            whole = tuple(obj.shape), obj.stride()
            return _make_placeholder, (whole, obj.dtype, obj.requires_grad, self._managed[id(obj)])
        if is_dtensor(obj):
            is_parameter = isinstance(obj, nn.Parameter)
            split, whole = (obj.device_mesh, obj.placements), (tuple(obj.shape), obj.stride())
            return _make_dtensor, (obj.to_local().detach(), split, whole, (obj.requires_grad, is_parameter))
        if (declared := placed(obj)) is not None:
            return (
                *obj.__reduce_ex__(5)[:2],
                (declared.mesh, declared.placements, declared.shape),
                None,
                None,
                _declare,
            )
        if issubclass(kind, device_mesh_type()):
            if (root := obj._get_root_mesh()) is not obj and obj.mesh_dim_names:
                return _slice_mesh, (root, obj.mesh_dim_names)
            groups = [str(group.group_name) for group in obj.get_all_groups()]
            return _make_mesh, (groups, obj.device_type, obj.mesh.tolist(), obj.mesh_dim_names)
        if (reduced := reduce(obj, kind, current().config.world_size)) is not None:
            return reduced
        return super().reduce_object(obj, kind)

    def raise_if_uncopyable(self, obj: Any, kind: type) -> None:
        """Raise CannotCopyError for what belongs to this process alone."""
        if is_sharded(obj):
            raise CannotCopyError("is sharded by FSDP1: use `fully_shard`")
        raise_if_of_process(kind)


def _declare(tensor: torch.Tensor, state: tuple[Any, ...]) -> None:
    mesh, placements, shape = state
    declare_placements(tensor, mesh, placements, shape=shape)


def _make_mesh(groups: list[str], device_type: str, ranks: Any, names: tuple[str, ...] | None) -> Any:
    own = {str(group.group_name): group for group in install.rebuildable_groups()}
    members: Any = [own[name] for name in groups]
    return DeviceMesh.from_group(members if len(members) > 1 else members[0], device_type, ranks, mesh_dim_names=names)


def _slice_mesh(root: Any, names: tuple[str, ...]) -> Any:
    return root[names]


def _make_placeholder(whole: _Whole, dtype: torch.dtype, requires_grad: bool, split: _Split | None) -> Any:
    if split is None:
        return placeholder(whole[0], dtype, requires_grad, True)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, _ = compute_local_shape_and_global_offset(whole[0], *split)
    return _make_dtensor(torch.empty(local, dtype=dtype, device="meta"), split, whole, (requires_grad, True))


def _make_dtensor(local: torch.Tensor, split: _Split, whole: _Whole, kind: tuple[bool, bool]) -> Any:
    dtensor: Any = loaded_class("torch.distributed.tensor", "DTensor")
    shape, stride = whole
    requires_grad, is_parameter = kind
    tensor = dtensor.from_local(local, *split, run_check=False, shape=torch.Size(shape), stride=stride).detach()
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


@dataclass(frozen=True, slots=True)
class Shards:
    """What this rank holds of the parameters that FSDP2 manages."""

    split: dict[int, Any]
    """By the parameter's `id`, mesh and placements of the DTensor that it was before; None: a plain tensor."""
    pieces: _Pieces
    """Shard and gradient, by variable and parameter."""


def own_shards(models: Mapping[str, Any]) -> Shards:
    """Return the shards of this rank, of models by variable."""
    split, pieces = {}, _Pieces()
    for variable, model in models.items():
        for name, group, record in fsdp.parameters(model):
            parameter = record.sharded_param
            gradient = parameter.grad
            split[id(parameter)] = _split_before(parameter, group) if record.is_dtensor else None
            local = gradient.to_local().detach() if gradient is not None else None
            pieces[variable, name] = parameter.to_local().detach(), local
    return Shards(split, pieces)


def _split_before(parameter: Any, group: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return mesh and placements of the DTensor that FSDP2 has sharded: those that follow FSDP2's own."""
    mesh, own = parameter.device_mesh, group.mesh_info.mesh.ndim
    return mesh._get_root_mesh()[mesh.mesh_dim_names[own:]], tuple(parameter.placements[own:])


def adopt_shards(pieces: _Pieces) -> None:
    """Give the parameters of FSDP2 models, which have no data yet, these shards; does not communicate."""
    replaced = {}
    for variable, model in fsdp_models().items():
        for name, _, record in list(fsdp.parameters(model)):
            before = record.sharded_param
            replaced[id(before)] = before, fsdp.set_shard(record, *pieces[variable, name])
    fsdp.replace_parameters(replaced)
