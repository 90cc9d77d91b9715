"""Which part of which tensor this rank holds: of modules, optimizers and tensors in its namespace, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from axon_nb.engine.gathered import whole_parameters
from axon_nb.engine.named import look_up
from axon_nb.engine.placed import place_of, placed_local
from axon_nb.engine.session import current
from axon_nb.errors import UsageError
from axon_nb.records.shard import Shard

__all__ = ["layouts"]

_DDP = "torch.nn.parallel.distributed"


def layouts(names: Iterable[str], *, gradients: bool = False) -> list[dict[str, Any]]:
    """The parts that this rank holds.

    Args:
        names: Variables, or what is reached from one by ``.name`` and ``[index]``: modules (parameters and buffers),
            optimizers (their state), tensors, and lists, tuples and dicts of these.
        gradients: Whether gradients are told besides.

    Returns:
        Fields of `Shard`, one record a tensor.

    Raises:
        UsageError: there is no such variable, or nothing in it that is a tensor.
    """
    space = current().kernel.shell.user_ns
    records = []
    for name in names:
        value = look_up(name, space)
        found = list(_shards(name, value, space, gradients=gradients))
        if not found:
            raise UsageError(f"{name!r} is a {type(value).__name__} that holds no tensor.")
        records += [dataclasses.asdict(shard) for shard in found]
    return records


def _shards(name: str, value: Any, space: dict[str, Any], *, gradients: bool) -> Iterator[Shard]:
    if isinstance(value, torch.nn.Module):
        yield from _of_module(value, gradients=gradients)
    elif isinstance(value, Optimizer):
        yield from _of_optimizer(value, space)
    elif isinstance(value, torch.Tensor):
        yield _shard(name, "tensor", value)
        if gradients and value.grad is not None:
            yield _shard(name, "gradient", value.grad)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _shards(str(key), item, space, gradients=gradients)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _shards(f"{name}[{index}]", item, space, gradients=gradients)


def _of_module(module: torch.nn.Module, *, gradients: bool) -> Iterator[Shard]:
    modules = list(module.modules())
    whole = whole_parameters(modules)
    copied = _copied(modules)
    for name, parameter in module.named_parameters():
        sharded = whole.get(id(parameter))
        group = copied.get(id(parameter))
        yield _shard(name, "parameter", parameter, group=group, sharded=sharded)
        if gradients and parameter.grad is not None:
            yield _shard(name, "gradient", parameter.grad, group=group)
    for name, buffer in module.named_buffers():
        yield _shard(name, "buffer", buffer, group=copied.get(id(buffer)))


def _copied(modules: Iterable[torch.nn.Module]) -> dict[int, Any]:
    """The process group over which DDP keeps a tensor equal, by the tensor's `id`."""
    found: dict[int, Any] = {}
    for module in modules:
        if type(module).__module__ == _DDP and type(module).__name__ == "DistributedDataParallel":
            group: Any = module.process_group
            found |= {id(tensor): group for tensor in [*module.parameters(), *module.buffers()]}
    return found


def _of_optimizer(optimizer: Optimizer, space: dict[str, Any]) -> Iterator[Shard]:
    names, copied = _names_of_parameters(optimizer, space)
    for group_number, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"group {group_number}, parameter {number}")
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield _shard(f"{name}: {key}", "optimizer", value, group=copied.get(id(parameter)))


def _names_of_parameters(optimizer: Optimizer, space: dict[str, Any]) -> tuple[dict[int, str], dict[int, Any]]:
    """Names after the module in the namespace that has most of the optimizer's parameters; of a wrapper its content."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    best: dict[int, str] = {}
    copied: dict[int, Any] = {}
    for variable, value in list(space.items()):
        if variable.startswith("_") or not isinstance(value, torch.nn.Module):
            continue
        modules = list(value.modules())
        whole = whole_parameters(modules)
        named = ((name, whole.get(id(parameter), parameter)) for name, parameter in value.named_parameters())
        names = {id(parameter): name for name, parameter in named if id(parameter) in wanted}
        if names:
            copied |= _copied(modules)
            best = max(best, names, key=lambda found: (len(found), -sum(map(len, found.values()))))
    return best, copied


def _shard(name: str, role: str, tensor: Any, *, group: Any = None, sharded: Any = None) -> Shard:
    place = place_of(tensor, group=group, sharded=sharded)
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
