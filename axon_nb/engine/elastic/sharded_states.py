"""What is sharded on this rank, by a key that is the same on all ranks: parameters, gradients, optimizer states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from axon_nb.engine.elastic import fsdp, zero
from axon_nb.engine.live_objects import live_objects
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import is_dtensor, is_sharded

_FSDP = ("torch.distributed.fsdp", "FSDPModule")
Key = tuple[str, str, str]
"""A variable, a parameter in it (its name or its index), and which of its tensors."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What all ranks must know about a tensor to send it."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: torch.dtype
    device: str
    """``cpu`` or ``cuda``."""
    dim: int = -1
    """The dimension in which it is split; -1: it is whole, on one rank."""
    owner: int = -1
    """The rank that has it, if it is whole; -1: all of them."""
    value: Any = None
    """The value itself, if it is not a tensor."""


def _variables(kind: Any) -> Iterator[tuple[str, Any]]:
    seen = set()
    for name, value in sorted(user_variables(current().kernel.shell).items()):
        if isinstance(value, kind) and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def outer_modules() -> dict[str, Any]:
    """Return the variables that are modules, without those that another one contains."""
    modules = dict(_variables(torch.nn.Module))
    inner = {id(module) for value in modules.values() for module in value.modules() if module is not value}
    return {name: value for name, value in modules.items() if id(value) not in inner}


def fsdp_models() -> dict[str, Any]:
    """Return the variables that are, or contain, FSDP2 modules; a module inside another one is left out."""
    if not live_objects(_FSDP)[0]:
        return {}
    return {name: value for name, value in outer_modules().items() if any(map(is_sharded, value.modules()))}


def sharded_optimizers() -> dict[str, Any]:
    """Return the optimizers of which states, or parameters, are DTensors."""
    return {
        name: value
        for name, value in _variables(torch.optim.Optimizer)
        if not zero.is_zero(value) and any(is_dtensor(parameter) for parameter in parameters_of(value))
    }


def zero_optimizers() -> dict[str, Any]:
    """Return the ZeRO-1 optimizers."""
    return {name: value for name, value in _variables(torch.optim.Optimizer) if zero.is_zero(value)}


def parameters_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def own_pieces() -> dict[Key, tuple[Piece, Any]]:
    """Return what this rank holds of each sharded tensor, or the value itself."""
    pieces: dict[Key, tuple[Piece, Any]] = {}
    for name, model in fsdp_models().items():
        for parameter, _, record in fsdp.parameters(model):
            pieces[name, parameter, "parameter"] = _piece(record.sharded_param)
            if record.sharded_param.grad is not None:
                pieces[name, parameter, "gradient"] = _piece(record.sharded_param.grad)
    for name, optimizer in sharded_optimizers().items():
        for index, parameter in enumerate(parameters_of(optimizer)):
            for key, value in optimizer.state.get(parameter, {}).items():
                pieces[name, str(index), key] = _piece(value)
    rank = current().config.rank
    for name, optimizer in zero_optimizers().items():
        for (index, key), value in zero.states(optimizer).items():
            pieces[name, str(index), key] = _piece(value, owner=rank)
    return pieces


def _piece(value: Any, *, owner: int = -1) -> tuple[Piece, Any]:
    if not isinstance(value, torch.Tensor):
        return Piece((), torch.float32, "cpu", owner=owner, value=value), None
    local = value.detach()
    dim = -1
    if is_dtensor(value):
        local = value.to_local().detach()  # type: ignore[attr-defined]
        (placement,) = value.placements  # type: ignore[attr-defined]
        dim = placement.dim if placement.is_shard() else -1
    return Piece(tuple(value.shape), value.dtype, local.device.type, dim, owner), local
