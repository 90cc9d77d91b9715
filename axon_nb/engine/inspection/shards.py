"""Which part of which tensor this rank holds: of modules, optimizers and tensors in its namespace, by name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from axon_nb.engine.inspection.gradients import from_gradients
from axon_nb.engine.namespace import look_up
from axon_nb.engine.session import current
from axon_nb.engine.sharding.placement import Cut, cut_parameters, place_of, placed_local, whole_parameters
from axon_nb.engine.sharding.sharded import loaded
from axon_nb.errors import UsageError
from axon_nb.records.placement import Shard
from axon_nb.records.protocol.contents import LayoutsReply

__all__ = ["layout_report"]


def layout_report(names: Iterable[str], *, gradients: bool = False, known: str = "") -> LayoutsReply:
    """The parts that this rank holds.

    Args:
        names: Variables, or what is reached from one by ``.name`` and ``[index]``: modules (parameters and buffers),
            optimizers (their state), tensors, and lists, tuples and dicts of these.
        gradients: Whether gradients are told besides.
        known: The key of the last answer to the same question; empty: there was none.

    Raises:
        UsageError: there is no such variable, or nothing in it that is a tensor.
    """
    space = current().kernel.shell.user_ns
    records: list[Shard] = []
    for name in names:
        value = look_up(name, space)
        found = list(_shards(name, value, space, gradients=gradients))
        if not found:
            raise UsageError(f"{name!r} is a {type(value).__name__} that holds no tensor.")
        records += found
    key = f"{os.getpid()}:{hash(tuple(records))}"
    if key == known:
        return LayoutsReply(key, None)
    return LayoutsReply(key, tuple(records))


def _shards(name: str, value: Any, space: dict[str, Any], *, gradients: bool) -> Iterator[Shard]:
    if isinstance(value, torch.nn.Module):
        yield from _of_module(value, gradients=gradients)
    elif isinstance(value, Optimizer):
        yield from _of_optimizer(value, space)
    elif isinstance(value, torch.Tensor):
        held = _holder(value, space)
        yield _shard(name, "tensor", value, held)
        if gradients:
            yield from filter(None, _of_gradients([(name, value, held)]))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _shards(str(key), item, space, gradients=gradients)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _shards(f"{name}[{index}]", item, space, gradients=gradients)


@dataclass(frozen=True)
class _Held:
    """What modules know of the tensors that they hold, by the tensor's `id`."""

    whole: dict[int, Any] = field(default_factory=dict)
    """The DTensor of which a parameter is the whole just now."""
    copied: dict[int, Any] = field(default_factory=dict)
    """The process group over which DDP keeps it equal."""
    cut: dict[int, Cut] = field(default_factory=dict)
    """How a tensor-parallel layer holds it."""

    @staticmethod
    def by(module: torch.nn.Module) -> _Held:
        """What a module and those within it know."""
        modules = list(module.modules())
        return _Held(whole_parameters(modules), _copied(modules), cut_parameters(modules))

    def of(self, tensor: Any, *, shape_of: Any = None) -> dict[str, Any]:
        """What is known of one parameter or buffer.

        Args:
            tensor: The parameter or buffer.
            shape_of: What is shown instead, such as a state of the optimizer; one of another shape is not cut along.
        """
        same = shape_of is None or tuple(shape_of.shape) == tuple(tensor.shape)
        return {"group": self.copied.get(id(tensor)), "cut": self.cut.get(id(tensor)) if same else None}


def _holder(tensor: torch.Tensor, space: dict[str, Any]) -> dict[str, Any]:
    """What is known of a tensor by itself: it may be a parameter of one of the variables."""
    if not isinstance(tensor, torch.nn.Parameter):
        return {}
    for value in list(space.values()):
        # type() and not isinstance: lazy proxies answer the latter with side effects.
        if issubclass(type(value), torch.nn.Module) and any(tensor is own for own in value.parameters()):
            return _Held.by(value).of(tensor)
    return {}


def _of_module(module: torch.nn.Module, *, gradients: bool) -> Iterator[Shard]:
    held = _Held.by(module)
    parameters = [(name, parameter, held.of(parameter)) for name, parameter in module.named_parameters()]
    found = _of_gradients(parameters) if gradients else []
    for (name, parameter, known), gradient in itertools.zip_longest(parameters, found):
        yield _shard(name, "parameter", parameter, known, sharded=held.whole.get(id(parameter)))
        if gradient is not None:
            yield gradient
    for name, buffer in module.named_buffers():
        yield _shard(name, "buffer", buffer, held.of(buffer))


def _of_gradients(parameters: Sequence[tuple[str, torch.Tensor, dict[str, Any]]]) -> list[Shard | None]:
    """The gradient of each parameter, where it has one; of name, parameter and what is known of it."""

    def make(gradients: list[torch.Tensor | None]) -> list[Shard | None]:
        return [
            None if gradient is None else _shard(name, "gradient", gradient, known)
            for (name, _, known), gradient in zip(parameters, gradients, strict=True)
        ]

    tensors = [parameter for _, parameter, _ in parameters]
    none: list[Shard | None] = [None] * len(parameters)
    return from_gradients(("layouts", *map(id, tensors)), tensors, make, before=none)


def _copied(modules: Iterable[torch.nn.Module]) -> dict[int, Any]:
    """The process group over which DDP keeps a tensor equal, by the tensor's `id`."""
    found: dict[int, Any] = {}
    for module in modules:
        own: Any = module
        if issubclass(type(own), loaded("axon_nb.parallel.data.zero", "ZeRO1")):
            own = own.ddp  # it is out of the sight of modules()
        if isinstance(own, torch.nn.parallel.DistributedDataParallel):
            group: Any = own.process_group
            found |= {id(tensor): group for tensor in [*own.parameters(), *own.buffers()]}
    return found


def _of_optimizer(optimizer: Optimizer, space: dict[str, Any]) -> Iterator[Shard]:
    # ZeroRedundancyOptimizer holds states in the optimizer of its own part: no other rank has them.
    own: Optimizer = getattr(optimizer, "optim", optimizer)
    names, held = _names_of_parameters(optimizer, space)
    for group_number, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"group {group_number}, parameter {number}")
            for key, value in own.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    known = held.of(parameter, shape_of=value)
                    known |= {} if own is optimizer else {"group": None}
                    yield _shard(f"{name}: {key}", "optimizer", value, known)


def _names_of_parameters(optimizer: Optimizer, space: dict[str, Any]) -> tuple[dict[int, str], _Held]:
    """Names after the module in the namespace that has most of the optimizer's parameters; of a wrapper its content."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    best: dict[int, str] = {}
    known = _Held()
    for variable, value in list(space.items()):
        # type() and not isinstance: lazy proxies answer the latter with side effects.
        if variable.startswith("_") or not issubclass(type(value), torch.nn.Module):
            continue
        held = _Held.by(value)
        # While parameters are whole, the optimizer still has the sharded ones.
        stands_for = {id(parameter): id(held.whole.get(id(parameter), parameter)) for parameter in value.parameters()}
        named = ((name, stands_for[id(parameter)]) for name, parameter in value.named_parameters())
        names = {key: name for name, key in named if key in wanted}
        if names:
            known.copied.update(held.copied)
            known.cut.update({stands_for.get(key, key): cut for key, cut in held.cut.items()})
            best = max(best, names, key=lambda found: (len(found), -sum(map(len, found.values()))))
    return best, known


def _shard(name: str, role: str, tensor: Any, known: Mapping[str, Any], *, sharded: Any = None) -> Shard:
    place = place_of(tensor, sharded=sharded, **known)
    local = placed_local(tensor)
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
