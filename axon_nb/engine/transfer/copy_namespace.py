"""Copying variables from this rank to a fresh one: packed once, sent through the default group, taken over as one."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import random
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from axon_nb.engine.groups import install
from axon_nb.engine.namespace import users_variables
from axon_nb.engine.session import current
from axon_nb.engine.transfer.namespace_pickle import NamespacePickler, reason
from axon_nb.records.protocol.transfer import PackedNamespace, Surroundings

__all__ = ["give", "group_variables", "pack", "take"]

_PIECE = 64 << 20


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


class _Probe(NamespacePickler):
    """Tells whether an object can be copied, without its tensors' bytes."""

    def persistent_id(self, obj: Any) -> Any:
        return "storage" if isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)) else None


def group_variables() -> dict[str, str]:
    """The variables of this rank that are process groups: name of the variable, name of the group."""
    groups = {id(group): group.group_name for group in install.all_groups()}
    variables = users_variables(current().kernel.shell)
    return {name: groups[id(value)] for name, value in variables.items() if id(value) in groups}


def pack(names: Sequence[str] = ()) -> PackedNamespace:
    """Make a parcel of variables; it is kept for `give`.

    Args:
        names: Which; empty: all that can be copied.
    """
    variables = users_variables(current().kernel.shell)
    chosen = {name: variables[name] for name in names if name in variables} if names else variables
    skipped = {name: f"is no variable of rank {current().config.rank}" for name in names if name not in variables}
    copied = {}
    for name, value in chosen.items():
        try:
            _Probe(_Nowhere(), protocol=5).dump(value)
        except Exception as error:
            skipped[name] = reason(error)
        else:
            copied[name] = value
    parcel = _dump({"variables": copied, "gradients": _gradients(copied.values()), "random": _random_state()})
    current().packed = parcel
    return PackedNamespace(
        copied=tuple(copied),
        skipped=skipped,
        size=len(parcel),
        digest=hashlib.sha256(parcel).hexdigest(),
        surroundings=_surroundings(copied),
    )


def give(ranks: Sequence[int]) -> None:
    """Send the parcel to each of `ranks`, which must be in `take`."""
    session = current()
    parcel, session.packed = torch.frombuffer(session.packed, dtype=torch.uint8), bytearray()
    for rank in ranks:
        for piece in parcel.split(_PIECE):
            dist.send(piece.to(_carrier()), rank)


def take(source: int, size: int, digest: str, surroundings: Surroundings, groups: Mapping[str, str]) -> None:
    """Receive the parcel from `source` and put its variables into the namespace.

    Args:
        source: The rank that is in `give`.
        size: Bytes of the parcel.
        digest: Its SHA-256: Gloo's connections prove nobody's identity, and a pickle runs code.
        surroundings: What `pack` said of folder and modules.
        groups: Variables that are process groups on other ranks, with the groups' names.
    """
    parcel = torch.empty(size, dtype=torch.uint8)
    for piece in parcel.split(_PIECE):
        carrier = piece.to(_carrier())
        dist.recv(carrier, source)
        if carrier is not piece:
            piece.copy_(carrier)
    data: Any = parcel.numpy()
    if hashlib.sha256(data).hexdigest() != digest:
        raise RuntimeError(f"what came from rank {source} is not what it sent")
    _take_up(surroundings)
    content = torch.load(io.BytesIO(data), map_location=_place, weights_only=False)
    shell = current().kernel.shell
    known = {group.group_name: group for group in install.all_groups()}
    absent = dist.GroupMember.NON_GROUP_MEMBER
    shell.user_ns.update(content["variables"])
    # Last: on a source that is not in such a group the variable is but a number.
    shell.user_ns.update({name: known.get(group, absent) for name, group in groups.items()})
    for parameter, gradient in content["gradients"]:
        parameter.grad = gradient
    _set_random_state(content["random"])


def _dump(content: dict[str, Any]) -> bytearray:
    file = io.BytesIO()
    torch.save(content, file, pickle_module=_PickleModule, pickle_protocol=5)
    return bytearray(file.getbuffer())


class _PickleModule:
    """What torch.save takes for a pickle module."""

    Pickler = NamespacePickler


def _gradients(values: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parameters: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.nn.Module):
            parameters.update({id(parameter): parameter for parameter in value.parameters()})
        elif isinstance(value, torch.optim.Optimizer):
            parameters.update({id(p): p for group in value.param_groups for p in group["params"]})
    return [(parameter, parameter.grad) for parameter in parameters.values() if parameter.grad is not None]


def _surroundings(variables: dict[str, Any]) -> Surroundings:
    tops = {value.__name__.partition(".")[0] for value in variables.values() if isinstance(value, types.ModuleType)}
    modules = [name for name in list(sys.modules) if name.partition(".")[0] in tops]
    return Surroundings(tuple(sys.path), os.getcwd(), tuple(modules))


def _take_up(surroundings: Surroundings) -> None:
    sys.path[:] = surroundings.path
    with contextlib.suppress(OSError):
        os.chdir(surroundings.folder)
    for name in surroundings.modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # what a variable needs is told when it is loaded
                importlib.import_module(name)


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "random": random.getstate()}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["random"])


def _carrier() -> torch.device:
    return current().device if dist.get_backend() == "nccl" else torch.device("cpu")


def _place(storage: Any, location: str) -> Any:
    own = str(current().device) if location.startswith("cuda") else location
    return torch.serialization.default_restore_location(storage, own)
