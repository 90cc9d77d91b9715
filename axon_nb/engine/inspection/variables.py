"""Describes the user's variables on this rank: what they are, digests to compare ranks by, and which shards they hold.

A value is taken apart down to its leaves: numbers, text, and the memory of arrays. The digest of each part is computed
here, so that two ranks are compared without moving what they hold; only the leaves that differ are sent, as arrays.
What has no faithful form (a lock, a generator, a shard) is named, and never counts as equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from msgspec import Struct, field
from msgspec.structs import asdict
from torch.optim import Optimizer

from axon_nb.comm.placements import placed
from axon_nb.engine import sharding
from axon_nb.engine.inspection.memory import GradientReader
from axon_nb.engine.session import current, resolve_variable, user_variables
from axon_nb.engine.values import SCALARS, CannotCompareError, Node, describe, digest_of, shape_of
from axon_nb.errors import UsageError
from axon_nb.records.protocol.inspection import LayoutsReply, VariableFacts, VariablePart, VariableTree
from axon_nb.records.telemetry import Shard
from axon_nb.records.units import count_of, format_bytes
from axon_nb.shell.value_pickle import array_device, as_numpy, unpicklable
from axon_nb.torch_api import torch_api

_MAX_SECONDS = 30.0
"""Time for one variable, or for a table of all."""
_MAX_NODES = 1_000_000
_MAX_DEPTH = 100
_MAX_BYTES = 1 << 28
"""Most bytes of leaves that are sent to be compared element by element."""
_MAX_TEXT = 400
_CHUNK = 1 << 26
_MAX_DIGEST = 1 << 30
"""Largest variable, in bytes, that a table of all variables compares."""
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def _reason(value: Any, error: Exception) -> str:
    if what := unpicklable(error):
        return what
    return f"a {type(value).__name__}: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}".rstrip(": ")


class _TooMuchError(Exception):
    """The variable takes too long to compare; the message says what is exceeded."""


class DigestWalk:
    """Takes a value apart, and keeps digests of its parts in the order in which they are met.

    Args:
        name: The variable's.
        began: When the time for it began, on the monotonic clock; None: now.
        max_bytes: Most bytes that are digested; None: no limit.
        wanted: The numbers of the parts to collect; then nothing is digested.
    """

    def __init__(
        self,
        name: str,
        *,
        began: float | None = None,
        max_bytes: int | None = None,
        wanted: frozenset[int] | None = None,
    ) -> None:
        self._end = (time.monotonic() if began is None else began) + _MAX_SECONDS
        self._max_bytes, self._wanted, self._bytes = max_bytes, wanted, 0
        self._path = [name]
        self._active: dict[int, int] = {}
        """Depths of the values that the current one is a part of, by id."""
        self._seen: dict[int, tuple[bytes, bytes, Any]] = {}
        """Head and digest by id, with the value, so that its id stays its own."""
        self._unrecorded = 0
        self.digests, self.heads, self.labels = bytearray(), bytearray(), bytearray()
        """16, 8 and 8 bytes for each part: of all it holds, of its kind alone, and of how it is reached."""
        self.ends: list[int] = []
        """For each part, the number of the one that follows its last child."""
        self.skipped: dict[int, tuple[str, str]] = {}
        """What is not compared, by number: its path and why."""
        self.found: dict[int, VariablePart] = {}

    def run(self, value: Any) -> None:
        """Walk over a variable; if that is too much, nothing of it is compared."""
        try:
            self._visit(value, "")
        except (_TooMuchError, RecursionError, MemoryError) as error:
            reason = str(error) if isinstance(error, _TooMuchError) else type(error).__name__
            self.digests, self.heads, self.labels = bytearray(16), bytearray(8), bytearray(8)
            self.ends, self.skipped = [1], {0: (self._path[0], reason)}

    def named_skips(self) -> list[tuple[str, str]]:
        """The first of what is not compared, and how many more there are."""
        first = list(self.skipped.values())[:3]
        rest = len(self.skipped) - len(first)
        return [*first, *([("…", f"{rest} more")] if rest else [])]

    def _visit(self, value: Any, label: str) -> bytes:
        index = len(self.ends)
        if not self._unrecorded:
            self.digests += bytes(16)
            self.heads += bytes(8)
            self.labels += digest_of([label.encode("utf-8", "surrogatepass")], 8)
            self.ends.append(0)
        if index > _MAX_NODES:
            raise _TooMuchError(f"more than {_MAX_NODES:,} values")
        if index % 1024 == 0 and time.monotonic() > self._end:
            raise _TooMuchError(f"more than {_MAX_SECONDS:.0f} s")
        head, digest = self._digests(value, index)
        if not self._unrecorded:
            self.digests[16 * index : 16 * index + 16], self.heads[8 * index : 8 * index + 8] = digest, head
            self.ends[index] = len(self.ends)
        return digest

    def _digests(self, value: Any, index: int) -> tuple[bytes, bytes]:
        if type(value) in SCALARS:
            return self._finish(describe(value), index)
        key = id(value)
        if key in self._active:
            node = Node(f"the value {len(self._path) - self._active[key]} levels up")
            return self._finish(node, index)
        if key in self._seen:  # what it holds has been numbered
            if self._wanted is not None and index in self._wanted:
                self._collect(describe(value), index)
            return self._seen[key][:2]
        self._active[key] = depth = len(self._path)
        try:
            if depth > _MAX_DEPTH:
                raise CannotCompareError(f"nested more than {_MAX_DEPTH} levels deep")
            result = self._finish(describe(value), index)
        except (_TooMuchError, RecursionError, MemoryError):
            raise
        except Exception as error:  # whatever an odd object raises
            reason = str(error) if isinstance(error, CannotCompareError) else _reason(value, error)
            del self._path[depth:]
            if self._unrecorded:
                raise CannotCompareError(reason) from None
            # Its children are forgotten: they were numbered for nothing.
            del self.digests[16 * index + 16 :], self.heads[8 * index + 8 :], self.labels[8 * index + 8 :]
            del self.ends[index + 1 :]
            self.skipped = {number: why for number, why in self.skipped.items() if number < index}
            self.skipped[index] = "".join(self._path), reason
            result = digest_of([b"skipped"], 8), digest_of([b"skipped"], 16)
        finally:
            del self._active[key]
        self._seen[key] = (*result, value)
        return result

    def _finish(self, node: Node, index: int) -> tuple[bytes, bytes]:
        if self._wanted is not None and index in self._wanted and not self._unrecorded:
            self._collect(node, index)
        head = digest_of([node.kind.encode("utf-8", "surrogatepass"), node.detail], 8)
        total = hashlib.blake2b(head, digest_size=16)
        if node.data is not None and self._wanted is None:
            self._bytes += node.size
            if self._max_bytes is not None and self._bytes > self._max_bytes:
                raise _TooMuchError(f"more than {format_bytes(self._max_bytes)}")
            for buffer in node.data():
                view = memoryview(buffer).cast("B") if not isinstance(buffer, bytes) else memoryview(buffer)
                for start in range(0, len(view), _CHUNK):
                    if start and time.monotonic() > self._end:
                        raise _TooMuchError(f"more than {_MAX_SECONDS:.0f} s")
                    total.update(view[start : start + _CHUNK])
        self._unrecorded += node.is_unordered
        parts = []
        try:
            for label, child in node.children:
                self._path.append(label)
                parts.append(digest_of([label.encode("utf-8", "surrogatepass")], 8) + self._visit(child, label))
                self._path.pop()
        finally:
            self._unrecorded -= node.is_unordered
        for part in sorted(parts) if node.is_unordered else parts:
            total.update(part)
        return head, total.digest()

    def _collect(self, node: Node, index: int) -> None:
        array = None
        if node.array is not None:
            self._bytes += node.size
            array = node.array() if self._bytes <= _MAX_BYTES else None
        text = node.kind if node.text is None else node.text()
        if len(text) > _MAX_TEXT:  # equal beginnings are not equal values
            digest = digest_of([text.encode("utf-8", "surrogatepass")], 8).hex()
            text = f"{text[:_MAX_TEXT]}… ({len(text):,} characters, digest {digest})"
        self.found[index] = VariablePart("".join(self._path), node.kind, text, array)


def _walk(name: str, value: Any, **options: Any) -> DigestWalk:
    walk = DigestWalk(name, **options)
    walk.run(value)
    return walk


def variable_facts() -> list[VariableFacts]:
    """One record per variable."""
    records, began = [], time.monotonic()
    for name, value in user_variables(current().kernel.shell).items():
        if isinstance(value, (type, ModuleType)) or (name == "mesh" and value is None):
            continue
        walk = _walk(name, value, began=began, max_bytes=_MAX_DIGEST)
        unchecked = "; ".join(f"{path} ({why})" if path != name else why for path, why in walk.named_skips())
        facts: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # unusual objects have no shape
            facts = _facts(value)
        digest = "" if walk.skipped.get(0) else walk.digests[:16].hex()
        records.append(VariableFacts(name, type(value).__name__, digest=digest, unchecked=unchecked, **facts))
    return records


def _facts(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return _tensor_facts([value], shape=shape_of(value))
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        count = sum(tensor.numel() for tensor in tensors)
        return _tensor_facts(tensors, shape=f"{count:,} parameters" if tensors else "")
    if isinstance(value, torch.optim.Optimizer):
        state = [item for entry in value.state.values() for item in entry.values() if isinstance(item, torch.Tensor)]
        return _tensor_facts(state, shape=f"{len(state)} tensors of state")
    numpy, pandas = sys.modules.get("numpy"), sys.modules.get("pandas")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return {"shape": shape_of(value), "dtype": str(value.dtype), "bytes": value.nbytes}
    if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series)):
        size = value.memory_usage(deep=True)
        return {"shape": shape_of(value), "bytes": int(getattr(size, "sum", lambda: size)())}
    if (device := array_device(value)) is not None:
        array = value if hasattr(value, "dtype") else as_numpy(value)
        size = int(getattr(value, "nbytes", 0))
        return {"shape": shape_of(array), "dtype": str(array.dtype), "device": device, "bytes": size}
    if type(value) in _SCALARS:
        return {
            "shape": repr(value[:40] if isinstance(value, (str, bytes)) else value)[:40],
            "bytes": sys.getsizeof(value),
        }
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return {"shape": count_of(len(value), "item"), "bytes": sys.getsizeof(value)}
    return {}


def _tensor_facts(tensors: list[Any], *, shape: str) -> dict[str, Any]:
    known = [found for tensor in tensors if (found := placed(tensor)) is not None]
    local = [tensor.to_local() if sharding.is_dtensor(tensor) else tensor for tensor in tensors]
    where = dict.fromkeys(", ".join(map(sharding.format_placement, found.placements)) for found in known)
    return {
        "shape": shape,
        "dtype": ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        "device": ", ".join(dict.fromkeys(str(tensor.device) for tensor in local)),
        "where": "; ".join(where),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in local),
    }


def variable_tree(name: str) -> VariableTree:
    """The digests of a variable and of all its parts."""
    variables = user_variables(current().kernel.shell)
    if name not in variables:
        return VariableTree(refused="has no such variable")
    if isinstance(variables[name], ModuleType):
        return VariableTree(refused="is a module, and modules are not compared")
    walk = _walk(name, variables[name])
    return VariableTree(
        digests=bytes(walk.digests),
        heads=bytes(walk.heads),
        labels=bytes(walk.labels),
        ends=struct.pack(f"<{len(walk.ends)}q", *walk.ends),
        skipped={index: why for index, (_, why) in walk.skipped.items()},
        paths={index: path for index, (path, _) in walk.skipped.items()},
    )


def variable_parts(name: str, nodes: tuple[int, ...]) -> dict[int, VariablePart]:
    """Some parts of a variable, by their numbers in its tree."""
    variables = user_variables(current().kernel.shell)
    if name not in variables:
        return {}
    return _walk(name, variables[name], wanted=frozenset(nodes)).found


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


class _TensorInfo(Struct, frozen=True):
    """What modules know about the tensors that they hold, by the tensor's `id`."""

    unsharded: dict[int, Any] = field(default_factory=dict)
    """The DTensor behind a parameter that is currently unsharded."""
    replicated: dict[int, Any] = field(default_factory=dict)
    """The process group over which DDP, or a plan of transformers, replicates it."""
    cut: dict[int, sharding.LayerSharding] = field(default_factory=dict)
    """How a tensor-parallel layer shards it."""

    @staticmethod
    def by(module: torch.nn.Module) -> _TensorInfo:
        """Collect it from a module and its submodules."""
        modules = list(module.modules())
        return _TensorInfo(
            torch_api().fsdp_unsharded(modules), _replica_groups(modules), sharding.layer_shardings(modules)
        )

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


def _replica_groups(modules: Iterable[torch.nn.Module]) -> dict[int, Any]:
    """The process group over which a wrapper or a plan replicates a tensor, by the tensor's `id`."""
    groups: dict[int, Any] = {}
    for module in modules:
        wrapper: Any = module
        if issubclass(type(wrapper), sharding.loaded_class("axon_nb.parallel.data.sharded_model", "ZeRO1")):
            wrapper = wrapper.ddp  # modules() does not list it
        if isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
            group: Any = wrapper.process_group
            groups |= {id(tensor): group for tensor in [*wrapper.parameters(), *wrapper.buffers()]}
        elif issubclass(type(wrapper), sharding.loaded_class("transformers.modeling_utils", "PreTrainedModel")):
            groups |= _beside_parts(wrapper)
    return groups


def _beside_parts(module: torch.nn.Module) -> dict[int, Any]:
    """The group that shares a model by a plan of transformers, by the `id` of what is not split: all ranks have it."""
    parameters = list(module.parameters())
    meshes = {found.mesh for parameter in parameters if (found := placed(parameter)) is not None}
    whole = [tensor for tensor in [*parameters, *module.buffers()] if placed(tensor) is None]
    mesh = meshes.pop() if len(meshes) == 1 else None
    # FSDP leaves no parameter whole, and buffers to the program.
    if mesh is None or mesh.ndim != 1 or not any(isinstance(tensor, torch.nn.Parameter) for tensor in whole):
        return {}
    return {id(tensor): mesh.get_group() for tensor in whole}


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
    place = sharding.placement_of(tensor, sharded=sharded, **known)
    local = sharding.local_tensor(tensor)
    size = local.numel() * local.element_size()
    return Shard(
        name=name,
        role=role,
        rank=current().config.rank,
        local_shape=tuple(local.shape),
        dtype=str(local.dtype).removeprefix("torch."),
        device=str(local.device),
        bytes=size + place.padding,
        gathered=sharded is not None,
        **asdict(place),
    )
