"""Logs storages: when each is made, resized and freed, in which phase and by which module."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axon_nb.parallel.data.gathering import local_shard
from axon_nb.plan.footprint.fake_world import NOWHERE, ORIGINS, RESULT, SAME, WHOLE_GRADIENTS
from axon_nb.plan.tracing.call_stack import CallStack

_WRAPPERS = (DTensor, AsyncCollectiveTensor)
_MAX_FRAMES = 60
"""Frames to look at for what made a storage."""


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
