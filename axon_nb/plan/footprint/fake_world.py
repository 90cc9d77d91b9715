"""A fake world of ranks without data: its private torch hooks, and a log of all storages that is replayed later.

The log has when each storage is made, resized and freed, in which phase, by which module and by which of torch's
buffers; the replay says what is held when, and for what purpose.

The hooks are written against torch 2.13.0, and torch.distributed 2.11.0 and 2.12.0. The register lists them as
`plan.simulation`; if a torch lacks one, nothing is simulated, and closed-form plans still work.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import Struct, field
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axon_nb.parallel.data import kept
from axon_nb.parallel.data.units import local_shard
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.plan import MemoryParts
from axon_nb.plan.tracing.fake_tensors import as_with_data, lazy_chunks, patched_apply, replaced, skip_init
from axon_nb.plan.tracing.operations import CallStack
from axon_nb.records.hooks import missing_hooks
from axon_nb.torch_api import torch_api

_DISTRIBUTED = Path(torch.__file__).parent / "distributed"
_FSDP = _DISTRIBUTED / "fsdp" / "_fully_shard"
NOWHERE = "nowhere"
"""Real runs allocate these without data too: torch asks an operation for its result's shape."""
_MAKERS: dict[tuple[Path, str], str] = {
    (_FSDP / "_fsdp_collectives.py", ""): "communication",
    (_FSDP / "_fsdp_param.py", ""): "unsharded",
    (Path(kept.__file__), ""): "unsharded",
    (_DISTRIBUTED / "_functional_collectives.py", ""): "communication",
    (_DISTRIBUTED / "tensor" / "_redistribute.py", ""): "communication",
    (_DISTRIBUTED / "tensor" / "_collective_utils.py", ""): "communication",
    (_DISTRIBUTED / "tensor" / "_sharding_prop.py", ""): NOWHERE,
    (_DISTRIBUTED / "tensor" / "_decompositions.py", ""): NOWHERE,
    (_DISTRIBUTED / "pipelining" / "_utils.py", "_make_tensor_from_meta"): "communication",
    (_DISTRIBUTED / "pipelining" / "stage.py", "_make_tensor_from_meta"): "communication",
}
ORIGINS = {(str(path), name): role for (path, name), role in _MAKERS.items()}
"""A storage's role by the file, and where needed the function, that allocates it."""
SAME = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
"""Operations that return their input; on fake tensors torch makes a new one (2.13)."""
RESULT = -1
GLOO_COPIES = {
    "c10d::_allgather_base_": 0,
    "c10d::allgather_": 0,
    "c10d::allgather_into_tensor_coalesced_": 0,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::reduce_scatter_": 1,
    "c10d::reduce_scatter_tensor_coalesced_": 1,
    "_c10d_functional::all_gather_into_tensor": RESULT,
    "_c10d_functional::reduce_scatter_tensor": 0,
}
"""What Gloo copies during a collective: an argument by its index, or the result; from its allocations (2.13)."""
WHOLE_GRADIENTS = frozenset({"fsdp::chunk_cat", "aten::_chunk_cat"})
"""The operation with which FSDP copies a unit's unsharded gradients: its first argument."""
NO_VALUES: tuple[type[Exception], ...] = tuple(
    getattr(fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
    if hasattr(fake_tensor, name)
)
"""What fake tensors raise when a value would be needed."""
_UNCACHED_MODULES = tuple(
    f"torch.distributed.tensor.{name}" for name in ("_dispatch", "_redistribute", "_sharding_prop")
)
_TRACING = "_are_we_tracing"
_FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"
_WRAPPERS = (DTensor, AsyncCollectiveTensor)
_MAX_FRAMES = 60
"""Frames to look at for what made a storage."""
Key = tuple[str, str, int]
"""A section of a step: its phase, and where in the model."""
_FORWARD_AND_BACKWARD = ("forward", "backward")


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Inside, this process is one rank of a world without other ranks: collectives do nothing.

    Raises:
        PlanError: this torch lacks a hook.
    """
    if missing := missing_hooks("plan.simulation"):
        raise PlanError(
            f"The simulator needs {', '.join(missing)}, which torch {torch.__version__} lacks: use "
            "method='closed_form'."
        )
    torch_api().prepare_fake_world()
    store: Any = importlib.import_module(_FAKE_GROUP).FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    """Make a mesh of the world's ranks; outside `fake_tensors`, because it holds rank numbers."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Inside, tensors have no data, except those of meshes, whose values are needed."""
    made = DeviceMesh.__init__

    def real(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with fake_tensor.unset_fake_temporarily():
            made(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(DeviceMesh, "__init__", real))
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # They skip work that takes time and changes no size: nothing else differs from a real step.
        for skipping in (patched_apply, skip_init, lazy_chunks, _dtensor_caches, as_with_data):
            stack.enter_context(skipping())
        yield mode


@contextlib.contextmanager
def _dtensor_caches() -> Iterator[None]:
    """Inside, DTensor uses its sharding caches, which it bypasses for fake tensors."""
    with contextlib.ExitStack() as stack:
        for module in filter(None, map(sys.modules.get, _UNCACHED_MODULES)):
            if hasattr(module, _TRACING):
                stack.enter_context(replaced(module, _TRACING, lambda: False))
        yield


class Change(NamedTuple):
    """A change of storage `block` by `size` bytes."""

    block: int
    size: int
    phase: str
    module: str


class StorageLog(TorchDispatchMode):
    """Counts each storage of fake tensors once, however many tensors share it.

    It reads no values and keeps nothing alive: storages are tracked by weak references.

    Args:
        copying: Collectives that copy one of their arguments while they run, and which one.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check would slow each operation

    def __init__(self, copying: Mapping[str, int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copying = copying or {}
        self.changes: list[Change] = []
        """Changes since `begin`."""
        self.start: dict[int, int] = {}
        """Bytes of the storages present at `begin`."""
        self.roles: dict[int, str] = {}
        """Roles of storages, as far as marked or known from their allocation."""
        self.makers: dict[int, tuple[str, str]] = {}
        """Phase and module in which each storage was made."""
        self.phase = "setup"
        self._known: dict[int, tuple[Any, int, int]] = {}
        self._next = 0
        self._stack: list[str] = []
        self._cursor = ""
        self._makers = CallStack(_role_of, _MAX_FRAMES)

    @property
    def module(self) -> str:
        """The running module, as far as known."""
        return self._stack[-1] if self._stack else self._cursor

    def begin(self) -> None:
        """Clear the log, but remember the storages."""
        self.changes.clear()
        self.start = {block: size for _, block, size in self._known.values()}

    def enter_phase(self, phase: str) -> None:
        """Assign changes from now on to a phase."""
        self.phase, self._cursor = phase, ""
        self._stack.clear()

    def mark(self, role: str, tensors: Iterable[Any], *, over: bool = True) -> None:
        """Set the role of these tensors' storages; unless `over`, only where none is known."""
        for tensor in tensors:
            entry = self._known.get(local_shard(tensor).untyped_storage()._cdata)
            if entry is not None and (over or entry[1] not in self.roles):
                self.roles[entry[1]] = role

    def mark_rest(self, role: str) -> None:
        """Set the role of all storages that have none."""
        for _, block, _ in self._known.values():
            self.roles.setdefault(block, role)

    def follow(self, model: nn.Module) -> None:
        """Assign changes from now on to modules of this model."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._entering(name), prepend=True)
            module.register_forward_hook(self._leaving(name), always_call=True)

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._stack.append(name)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(functools.partial(self._backward_of, name))

        return leave

    def _backward_of(self, name: str, gradients: Any) -> None:
        self._cursor = name

    def __enter__(self) -> StorageLog:
        """Start logging."""
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._resize)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and log the storages of its results."""
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented  # their local tensors come here
        name = func._schema.name
        if name in SAME:
            return args[0]
        if name in WHOLE_GRADIENTS:
            self.mark("unsharded", args[0])
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor) and self._is_held(leaf):
                self._see(leaf.untyped_storage())
        if (copied := self._copying.get(name)) is not None:
            self._log_transient(result if copied == RESULT else args[copied])
        return result

    def _is_held(self, tensor: FakeTensor) -> bool:
        """Whether a real tensor would take memory."""
        return True

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known or not (size := storage.nbytes()):
            return
        if (role := self._origin()) != NOWHERE:
            self._add(storage, size, role)

    def _origin(self) -> str:
        """The role of a storage made now, by the code that makes it; empty: unknown."""
        return next((role for role, _ in self._makers.frames()), "")

    def _add(self, storage: torch.UntypedStorage, size: int, role: str) -> None:
        key, block = storage._cdata, self._next
        self._next += 1
        self._known[key] = weakref.ref(storage, functools.partial(self._gone, key)), block, size
        self.makers[block] = self.phase, self.module
        if role:
            self.roles[block] = role
        self._change(block, size)

    def _log_transient(self, tensors: Any) -> None:
        """Log copies that are freed when the operation ends."""
        for tensor in tree_leaves(tensors):
            block, size = self._next, tensor.nbytes
            self._next += 1
            self.makers[block], self.roles[block] = (self.phase, self.module), "communication"
            self._change(block, size)
            self._change(block, -size)

    def _gone(self, key: int, _: Any) -> None:
        _, block, size = self._known.pop(key)
        self._change(block, -size)

    def _change(self, block: int, size: int) -> None:
        self.changes.append(Change(block, size, self.phase, self.module))

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(resize)
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            entry = self._known.get(storage._cdata)
            if entry is None:
                # Such as FSDP's unsharded parameters, whose storage outlives the tensor.
                if size:
                    self._add(storage, size, self._origin())
            else:
                reference, block, before = entry
                self._known[storage._cdata] = reference, block, size
                self._change(block, size - before)
            return result

        return resized


def _role_of(code: CodeType) -> str:
    """The role of a storage that this code makes; empty: unknown."""
    return ORIGINS.get((code.co_filename, "")) or ORIGINS.get((code.co_filename, code.co_name)) or ""


class Moment(Struct, frozen=True):
    """What is held at one moment."""

    parts: MemoryParts
    phase: str = ""
    module: str = ""
    activations: Mapping[str, int] = field(default_factory=dict)
    """By the module whose forward made them."""


class StepLog(Struct, frozen=True):
    """The log of one step.

    Args:
        start: Bytes of the storages at the start of the step.
        changes: Changes in time order.
        roles: Roles of storages, as far as known.
        makers: Phase and module in which each storage was made.
        offloaded: Roles that are kept in host memory.
        own_memory: Whether the device has memory of its own, so that host memory does not count.
    """

    start: Mapping[int, int]
    changes: tuple[Change, ...]
    roles: Mapping[int, str]
    makers: Mapping[int, tuple[str, str]]
    offloaded: Collection[str]
    own_memory: bool

    def part_of(self, block: int) -> str | None:
        """The part that a storage counts for; None: it is on the host."""
        role = self.roles.get(block)
        phase = self.makers[block][0]
        if self.own_memory and (
            role in self.offloaded or (role is None and phase == "optimizer" and self._steps_on_host)
        ):
            return None
        return role or ("activations" if phase in _FORWARD_AND_BACKWARD else "other")

    @property
    def _steps_on_host(self) -> bool:
        """Whether the optimizer's step runs on the host."""
        return "gradients" in self.offloaded

    def peaks(self, key: Callable[[str, str], Key]) -> dict[Key, Moment]:
        """Return the highest moment of each section of the step."""
        best: dict[Key, tuple[int, int]] = {}
        total = sum(size for block, size in self.start.items() if self.part_of(block))
        for number, change in enumerate(self.changes):
            if self.part_of(change.block):
                total += change.size
            name = key(change.phase, change.module)
            if name not in best or total > best[name][0]:
                best[name] = total, number
        moments = self._at({number for _, number in best.values()})
        return {name: moments[number] for name, (_, number) in best.items()}

    def between_steps(self) -> Moment:
        """Return what is held after the optimizer's step."""
        last = len(self.changes) - 1
        return self._at({last})[last]

    def bytes_of(self, role: str) -> int:
        """Return the bytes of a role after the optimizer's step, on the device or the host."""
        sizes = Counter(self.start)
        for change in self.changes:
            sizes[change.block] += change.size
        return sum(size for block, size in sizes.items() if self.roles.get(block) == role)

    def _at(self, numbers: Iterable[int]) -> dict[int, Moment]:
        wanted, moments = set(numbers), {}
        held = Counter(self.start)
        for number, change in enumerate(self.changes):
            held[change.block] += change.size
            if number in wanted:
                moments[number] = self._moment(held, change)
        return moments

    def _moment(self, held: Mapping[int, int], change: Change) -> Moment:
        parts: Counter[str] = Counter()
        activations: Counter[str] = Counter()
        for block, size in held.items():
            if not size or (part := self.part_of(block)) is None:
                continue
            parts[part] += size
            if part == "activations" and self.makers[block][0] == "forward":
                activations[self.makers[block][1]] += size
        return Moment(MemoryParts(**parts), change.phase, change.module, dict(activations))
