"""Copies variables from this rank to a fresh one: pickled as one, and sent through the default group."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.engine.elastic.pickling import apply_fsdp, fsdp_calls
from axon_nb.engine.elastic.sharded_states import fsdp_models, sharded_optimizers, zero_optimizers
from axon_nb.engine.groups import install
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.session import current
from axon_nb.engine.snapshot.random_states import random_states, set_random_states
from axon_nb.engine.transfer.namespace_pickle import NamespacePickler, copy_failure_reason
from axon_nb.records.protocol.transfer import ImportContext, PackedNamespace

__all__ = ["apply_import_context", "group_variables", "import_context", "pack", "receive", "send"]

_CHUNK_BYTES = 64 << 20


class _NullFile(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


class _ProbePickler(NamespacePickler):
    """Finds out whether an object can be copied, without copying the bytes of its tensors."""

    def persistent_id(self, obj: Any) -> Any:
        return "storage" if isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)) else None


def group_variables() -> dict[str, str]:
    """Return the variables of this rank that are process groups, with the names of the groups."""
    groups = {id(group): group.group_name for group in install.rebuildable_groups()}
    variables = user_variables(current().kernel.shell)
    return {name: groups[id(value)] for name, value in variables.items() if id(value) in groups}


def pack(names: Sequence[str] = ()) -> PackedNamespace:
    """Pickle variables, and keep the payload for `send`.

    Args:
        names: Which; empty: all that can be copied.
    """
    variables = user_variables(current().kernel.shell)
    selection = {name: variables[name] for name in names if name in variables} if names else variables
    skipped = {name: f"does not exist on rank {current().config.rank}" for name in names if name not in variables}
    copied, without = _copyable(selection)
    skipped |= without
    functions, without = _copyable({} if names else current().resize_functions)
    skipped |= {f"on_resize({name})": reason for name, reason in without.items()}
    content = {"variables": copied, "gradients": _gradients(copied.values()), "random": random_states()}
    if current().resized_from:
        for name in {*fsdp_models(), *sharded_optimizers(), *zero_optimizers()} & skipped.keys():
            raise RuntimeError(f"`{name}` {skipped[name]}")
        content["fsdp_calls"] = fsdp_calls()
    payload = _dump(content | {"resize_functions": functions})
    current().namespace_payload = payload
    return PackedNamespace(
        copied=tuple(copied),
        skipped=skipped,
        size=len(payload),
        digest=hashlib.sha256(payload).hexdigest(),
        import_context=import_context(copied),
    )


def _copyable(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return those that can be copied, and why each of the others cannot be."""
    copied, skipped = {}, {}
    for name, value in values.items():
        try:
            _ProbePickler(_NullFile(), protocol=5).dump(value)
        except Exception as error:
            skipped[name] = copy_failure_reason(error)
        else:
            copied[name] = value
    return copied, skipped


def send(ranks: Sequence[int]) -> None:
    """Send the payload to each of `ranks`, which must be in `receive`."""
    session = current()
    payload, session.namespace_payload = torch.frombuffer(session.namespace_payload, dtype=torch.uint8), bytearray()
    for rank in ranks:
        for chunk in payload.split(_CHUNK_BYTES):
            dist.send(chunk.to(_transfer_device()), rank)


def receive(source: int, size: int, digest: str, import_context: ImportContext, groups: Mapping[str, str]) -> None:
    """Receive the payload from `source` and put its variables into the namespace.

    Args:
        source: The rank that is in `send`.
        size: Bytes of the payload.
        digest: Its SHA-256, checked because a pickle runs code and Gloo's connections are not authenticated.
        import_context: Working folder and modules, as returned by `pack`.
        groups: Variables that are process groups on other ranks, with the names of the groups.

    Raises:
        RuntimeError: the payload does not match its digest.
    """
    payload = torch.empty(size, dtype=torch.uint8, device="cpu")
    for chunk in payload.split(_CHUNK_BYTES):
        buffer = chunk.to(_transfer_device())
        dist.recv(buffer, source)
        if buffer is not chunk:
            chunk.copy_(buffer)
    data: Any = payload.numpy()
    if hashlib.sha256(data).hexdigest() != digest:
        raise RuntimeError(f"the data received from rank {source} does not match its digest")
    apply_import_context(import_context)
    content = torch.load(io.BytesIO(data), map_location=_restore_location, weights_only=False)
    for parameter, gradient in content["gradients"]:
        parameter.grad = gradient
    shell = current().kernel.shell
    own_groups = {group.group_name: group for group in install.rebuildable_groups()}
    absent = dist.GroupMember.NON_GROUP_MEMBER
    shell.user_ns.update(content["variables"])
    # Last: on a source that is not a member of such a group, the variable is only a number.
    shell.user_ns.update({name: own_groups.get(group, absent) for name, group in groups.items()})
    apply_fsdp(content.get("fsdp_calls", ()))
    current().resize_functions.update(content["resize_functions"])
    set_random_states(content["random"])


def _dump(content: dict[str, Any]) -> bytearray:
    file = io.BytesIO()
    torch.save(content, file, pickle_module=_PickleModule, pickle_protocol=5)
    return bytearray(file.getbuffer())


class _PickleModule:
    """The part of a pickle module that torch.save uses."""

    Pickler = NamespacePickler


def _gradients(values: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parameters: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.nn.Module):
            parameters.update({id(parameter): parameter for parameter in value.parameters()})
        elif isinstance(value, torch.optim.Optimizer):
            parameters.update({id(p): p for group in value.param_groups for p in group["params"]})
    return [(parameter, parameter.grad) for parameter in parameters.values() if parameter.grad is not None]


def import_context(variables: Mapping[str, Any]) -> ImportContext:
    """Return what these variables need to be loaded elsewhere."""
    packages = {value.__name__.partition(".")[0] for value in variables.values() if isinstance(value, types.ModuleType)}
    modules = _modules_of(frozenset(packages), tuple(sys.modules))
    return ImportContext(tuple(sys.path), os.getcwd(), modules)


@functools.lru_cache(maxsize=1)  # protection asks after every step
def _modules_of(packages: frozenset[str], loaded: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in loaded if name.partition(".")[0] in packages)


def apply_import_context(context: ImportContext) -> None:
    """Take over what `import_context` returned in another process."""
    sys.path[:] = context.path
    with contextlib.suppress(OSError):
        os.chdir(context.folder)
    for name in context.modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # a variable that needs it fails with the reason when it is loaded
                importlib.import_module(name)


def _transfer_device() -> torch.device:
    return current().device if dist.get_backend() == "nccl" else torch.device("cpu")


def _restore_location(storage: Any, location: str) -> Any:
    target = str(current().device) if location.startswith("cuda") else location
    return torch.serialization.default_restore_location(storage, target)
