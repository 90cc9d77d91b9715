"""Copies variables from this rank to a fresh one: pickled as one, and sent through the default group."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.engine.elastic.pickling import apply_fsdp, fsdp_calls
from axon_nb.engine.elastic.sharded_states import fsdp_models, sharded_optimizers, zero_optimizers
from axon_nb.engine.groups import install
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import is_dtensor
from axon_nb.engine.snapshot.state import StateFinder
from axon_nb.engine.transfer.namespace_pickle import NamespacePickler
from axon_nb.engine.transfer.state_pickle import StateFile, dump, find_uncopyable, load, structure_of
from axon_nb.random_states import random_states, set_random_states
from axon_nb.records.protocol.transfer import PackedNamespace

_CHUNK_BYTES = 64 << 20
ImportContext = tuple[tuple[str, ...], str, tuple[str, ...]]
"""Import path, working folder, and modules."""


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
    skipped |= find_uncopyable(NamespacePickler, selection)
    copied = {name: value for name, value in selection.items() if name not in skipped}
    functions = {} if names else current().resize_functions
    without = find_uncopyable(NamespacePickler, functions)
    skipped |= {f"on_resize({name})": reason for name, reason in without.items()}
    models = fsdp_models() if current().resized_from else {}
    for name in {*models, *sharded_optimizers(), *zero_optimizers()} & skipped.keys() if current().resized_from else ():
        raise RuntimeError(f"`{name}` {skipped[name]}")
    content = {
        "variables": copied,
        "gradients": [pair for pair in StateFinder(copied).find().gradients() if not is_dtensor(pair[0])],
        "fsdp_calls": fsdp_calls(models),
        "resize_functions": {name: value for name, value in functions.items() if name not in without},
        "random": random_states(),
    }
    file = io.BytesIO()
    state = StateFile(file)
    state.finish(pickle.dumps((import_context(copied),)) + dump(NamespacePickler, content, state.save))
    current().namespace_payload = payload = bytearray(file.getbuffer())
    return PackedNamespace(
        copied=tuple(copied),
        skipped=skipped,
        size=len(payload),
        digest=hashlib.sha256(payload).hexdigest(),
    )


def send(ranks: Sequence[int]) -> None:
    """Send the payload to each of `ranks`, which must be in `receive`."""
    session = current()
    payload, session.namespace_payload = torch.frombuffer(session.namespace_payload, dtype=torch.uint8), bytearray()
    for rank in ranks:
        for chunk in payload.split(_CHUNK_BYTES):
            dist.send(chunk.to(_transfer_device()), rank)


def receive(source: int, size: int, digest: str, groups: Mapping[str, str]) -> None:
    """Receive the payload from `source` and put its variables into the namespace.

    Args:
        source: The rank that is in `send`.
        size: Bytes of the payload.
        digest: Its SHA-256, checked because a pickle runs code and Gloo's connections are not authenticated.
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
    view = memoryview(data)
    receive_content(structure_of(view), lambda offset, size: bytearray(view[offset : offset + size]))
    own_groups = {group.group_name: group for group in install.rebuildable_groups()}
    absent = dist.GroupMember.NON_GROUP_MEMBER
    # Last: on a source that is not a member of such a group, the variable is only a number.
    current().kernel.shell.user_ns.update({name: own_groups.get(group, absent) for name, group in groups.items()})


def receive_content(data: bytearray, read: Callable[[int, int], bytearray]) -> dict[str, Any]:
    """Take over the state of another process: variables, gradients, calls of `fully_shard`, functions, random states.

    Args:
        data: A pickled tuple that begins with what `import_context` returned, and then the content.
        read: See `load`.

    Returns:
        The content.
    """
    file = io.BytesIO(data)
    path, folder, modules = pickle.load(file)[0]
    sys.path[:] = path
    with contextlib.suppress(OSError):
        os.chdir(folder)
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # a variable that needs it fails with the reason when it is loaded
                importlib.import_module(name)
    content: dict[str, Any] = load(file, read)
    for tensor, gradient in content["gradients"]:
        tensor.grad = gradient
    current().kernel.shell.user_ns.update(content["variables"])
    apply_fsdp(content["fsdp_calls"])
    current().resize_functions.update(content["resize_functions"])
    set_random_states(content["random"])
    return content


def import_context(variables: Mapping[str, Any]) -> ImportContext:
    """Return what these variables need to be loaded elsewhere."""
    packages = {value.__name__.partition(".")[0] for value in variables.values() if isinstance(value, types.ModuleType)}
    return tuple(sys.path), os.getcwd(), _modules_of(frozenset(packages), tuple(sys.modules))


@functools.lru_cache(maxsize=1)  # protection asks after every step
def _modules_of(packages: frozenset[str], loaded: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in loaded if name.partition(".")[0] in packages)


def _transfer_device() -> torch.device:
    return current().device if dist.get_backend() == "nccl" else torch.device("cpu")
