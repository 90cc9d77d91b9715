"""Describes which parts of tensors this rank holds: of modules, optimizers and tensors in its namespace, by name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from axon_nb.comm.placements import placed
from axon_nb.engine.inspection.gradients import GradientReader
from axon_nb.engine.namespace import resolve_variable
from axon_nb.engine.session import current
from axon_nb.engine.sharding.placement import (
    LayerSharding,
    layer_shardings,
    local_tensor,
    placement_of,
)
from axon_nb.engine.sharding.sharded import loaded_class
from axon_nb.errors import UsageError
from axon_nb.records.placement import Shard
from axon_nb.records.protocol.contents import LayoutsReply
from axon_nb.torch_api import torch_api


def layout_report(
    names: Iterable[str], space: dict[str, Any], *, gradients: GradientReader | None = None, known: str = ""
) -> LayoutsReply:
    """Report the shards that this rank holds.

    Args:
        names: Variables, or values reached from one by ``.name`` and ``[index]``: modules (parameters and buffers),
            optimizers (their state), tensors, and lists, tuples and dicts of these.
        space: The namespace of the cells.
        gradients: Reads gradients; None: do not include them.
        known: Key of the last answer to the same request; empty if there was none.

    Raises:
        UsageError: a variable does not exist, or holds no tensor.
    """
    records: list[Shard] = []
    for name in names:
        value = resolve_variable(name, space)
        shards = list(_shards(name, value, space, gradients=gradients))
        if not shards:
            raise UsageError(f"{name!r} (type {type(value).__name__}) holds no tensors.")
        records += shards
    key = f"{os.getpid()}:{hash(tuple(records))}"
    if key == known:
        return LayoutsReply(key, None)
    return LayoutsReply(key, tuple(records))


def _shards(name: str, value: Any, space: dict[str, Any], *, gradients: GradientReader | None) -> Iterator[Shard]:
    if isinstance(value, torch.nn.Module):
        yield from _of_module(value, gradients=gradients)
    elif isinstance(value, Optimizer):
        yield from _of_optimizer(value, space)
    elif isinstance(value, torch.Tensor):
        info = _info_of_tensor(value, space)
        yield _shard(name, "tensor", value, info)
        if gradients:
            yield from filter(None, _of_gradients([(name, value, info)], gradients))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _shards(str(key), item, space, gradients=gradients)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _shards(f"{name}[{index}]", item, space, gradients=gradients)


@dataclass(frozen=True)
class _TensorInfo:
    """What modules know about the tensors that they hold, by the tensor's `id`."""

    unsharded: dict[int, Any] = field(default_factory=dict)
    """The DTensor behind a parameter that is currently unsharded."""
    replicated: dict[int, Any] = field(default_factory=dict)
    """The process group over which DDP replicates it."""
    cut: dict[int, LayerSharding] = field(default_factory=dict)
    """How a tensor-parallel layer shards it."""

    @staticmethod
    def by(module: torch.nn.Module) -> _TensorInfo:
        """Collect it from a module and its submodules."""
        modules = list(module.modules())
        return _TensorInfo(torch_api().fsdp_unsharded(modules), _ddp_groups(modules), layer_shardings(modules))

    def of(self, tensor: Any, *, shape_of: Any = None) -> dict[str, Any]:
        """What is known about one parameter or buffer.

        Args:
            tensor: The parameter or buffer.
            shape_of: The tensor shown instead, such as an optimizer state; it is sharded likewise only if the shapes
                match.
        """
        same = shape_of is None or tuple(shape_of.shape) == tuple(tensor.shape)
        return {
            "group": self.replicated.get(id(tensor)),
            "layer": self.cut.get(id(tensor)) if same else None,
            "like": placed(tensor) if same else None,
        }


def _info_of_tensor(tensor: torch.Tensor, space: dict[str, Any]) -> dict[str, Any]:
    """What is known about a single tensor, which may be a parameter of one of the variables."""
    if not isinstance(tensor, torch.nn.Parameter):
        return {"like": placed(tensor)}
    for value in list(space.values()):
        # type() instead of isinstance: lazy proxies answer the latter with side effects.
        if issubclass(type(value), torch.nn.Module) and any(tensor is parameter for parameter in value.parameters()):
            return _TensorInfo.by(value).of(tensor)
    return {"like": placed(tensor)}


def _of_module(module: torch.nn.Module, *, gradients: GradientReader | None) -> Iterator[Shard]:
    info = _TensorInfo.by(module)
    parameters = [(name, parameter, info.of(parameter)) for name, parameter in module.named_parameters()]
    gradient_records = _of_gradients(parameters, gradients) if gradients else []
    for (name, parameter, known), gradient in itertools.zip_longest(parameters, gradient_records):
        yield _shard(name, "parameter", parameter, known, sharded=info.unsharded.get(id(parameter)))
        if gradient is not None:
            yield gradient
    for name, buffer in module.named_buffers():
        yield _shard(name, "buffer", buffer, info.of(buffer))


def _of_gradients(
    parameters: Sequence[tuple[str, torch.Tensor, dict[str, Any]]], reader: GradientReader
) -> list[Shard | None]:
    """The gradient of each parameter, None if it has none; takes (name, parameter, what is known about it)."""

    def make(gradients: list[torch.Tensor | None]) -> list[Shard | None]:
        return [
            None if gradient is None else _shard(name, "gradient", gradient, known)
            for (name, _, known), gradient in zip(parameters, gradients, strict=True)
        ]

    tensors = [parameter for _, parameter, _ in parameters]
    none: list[Shard | None] = [None] * len(parameters)
    return reader.read(("layouts", *map(id, tensors)), tensors, make, default=none)


def _ddp_groups(modules: Iterable[torch.nn.Module]) -> dict[int, Any]:
    """The process group over which DDP replicates a tensor, by the tensor's `id`."""
    groups: dict[int, Any] = {}
    for module in modules:
        wrapper: Any = module
        if issubclass(type(wrapper), loaded_class("axon_nb.parallel.data.zero", "ZeRO1")):
            wrapper = wrapper.ddp  # modules() does not list it
        if isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
            group: Any = wrapper.process_group
            groups |= {id(tensor): group for tensor in [*wrapper.parameters(), *wrapper.buffers()]}
    return groups


def _of_optimizer(optimizer: Optimizer, space: dict[str, Any]) -> Iterator[Shard]:
    # ZeroRedundancyOptimizer holds its state in the optimizer of its own partition: no other rank has it.
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    names, info = _names_of_parameters(optimizer, space)
    for group_number, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"group {group_number}, parameter {number}")
            for key, value in inner.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    known = info.of(parameter, shape_of=value)
                    known |= {} if inner is optimizer else {"group": None}
                    yield _shard(f"{name}: {key}", "optimizer", value, known)


def _names_of_parameters(optimizer: Optimizer, space: dict[str, Any]) -> tuple[dict[int, str], _TensorInfo]:
    """Name parameters after the module in the namespace that holds most of them; a wrapper's after its content."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    best: dict[int, str] = {}
    known = _TensorInfo()
    for variable, value in list(space.items()):
        # type() instead of isinstance: lazy proxies answer the latter with side effects.
        if variable.startswith("_") or not issubclass(type(value), torch.nn.Module):
            continue
        info = _TensorInfo.by(value)
        # While parameters are unsharded, the optimizer still has the sharded ones.
        stands_for = {
            id(parameter): id(info.unsharded.get(id(parameter), parameter)) for parameter in value.parameters()
        }
        named = ((name, stands_for[id(parameter)]) for name, parameter in value.named_parameters())
        names = {key: name for name, key in named if key in wanted}
        if names:
            known.replicated.update(info.replicated)
            known.cut.update({stands_for.get(key, key): cut for key, cut in info.cut.items()})
            best = max(best, names, key=lambda candidate: (len(candidate), -sum(map(len, candidate.values()))))
    return best, known


def _shard(name: str, role: str, tensor: Any, known: Mapping[str, Any], *, sharded: Any = None) -> Shard:
    place = placement_of(tensor, sharded=sharded, **known)
    local = local_tensor(tensor)
    size = local.numel() * local.element_size()
    return Shard(
        name=name,
        role=role,
        rank=current().config.rank,
        local_shape=tuple(local.shape),
        dtype=str(local.dtype).removeprefix("torch."),
        device=str(local.device),
        bytes=size + place.padding,
        padding=place.padding,
        global_shape=place.global_shape,
        offset=place.offset,
        placements=place.placements,
        axes=place.axes,
        mesh_shape=place.mesh_shape,
        coordinates=place.coordinates,
        gathered=sharded is not None,
    )
