"""What a forward does: its operations in order, by the block that runs and by where each tensor comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_NEAR = 2
"""A tensor made at most this many blocks ago is named by the distance, any other one by its block."""
_PLAIN = (int, float, complex, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in an operation: its storage, by order of appearance, and which view of it."""

    storage: int
    facts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Event:
    """An operation, or the start or end of a block."""

    kind: str
    """``op``, ``enter`` or ``leave``."""
    name: str
    values: tuple[Any, ...] = ()
    made: tuple[_Tensor, ...] = ()


@dataclass
class ForwardTrace:
    """The events of a forward."""

    events: list[_Event] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    """Names of the storages of parameters and buffers."""


@dataclass(frozen=True, slots=True)
class Section:
    """What happens from the end of the block before to the end of this one."""

    before: tuple[Any, ...]
    """Operations ahead of the block, and where its inputs come from."""
    inside: tuple[Any, ...]
    """Operations of the block; its inputs are named by their position."""


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = ForwardTrace()
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no storage reuses another's address
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in named:
            self.trace.parameters.setdefault(self._number(tensor), name)

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._alive.append(storage)
            self._numbers[storage._cdata] = len(self._numbers)
        return self._numbers[storage._cdata]

    def tensor(self, value: torch.Tensor) -> _Tensor:
        facts = tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype, value.requires_grad
        return _Tensor(self._number(value), facts)

    def values(self, tree: Any) -> tuple[Any, ...]:
        leaves, shape = tree_flatten(tree)
        return shape, *(self._value(leaf) for leaf in leaves)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.tensor(leaf)
        return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else (type(leaf), id(leaf))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = self.values((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        made = tuple(self.tensor(one) for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor))
        self.trace.events.append(_Event("op", str(func), inputs, made))
        return result


@contextmanager
def _watched(blocks: dict[str, nn.Module], recorder: _Recorder) -> Iterator[None]:
    events = recorder.trace.events
    with ExitStack() as stack:
        for name, block in blocks.items():

            def entered(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                events.append(_Event("enter", name, recorder.values((args, kwargs))))

            def left(_: Any, args: Any, output: Any, name: str = name) -> None:
                events.append(_Event("leave", name))

            before = block.register_forward_pre_hook(entered, prepend=True, with_kwargs=True)
            after = block.register_forward_hook(left)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def trace_forward(model: nn.Module, blocks: dict[str, nn.Module], forward: Callable[[], Any]) -> ForwardTrace:
    """Trace a forward on tensors without data.

    Args:
        model: The model.
        blocks: Its blocks of interest, by name.
        forward: Runs the forward and the loss.
    """
    recorder = _Recorder(model)
    with _watched(blocks, recorder), recorder:
        forward()
    return recorder.trace


def sections(trace: ForwardTrace, blocks: Sequence[str]) -> tuple[list[Section], tuple[Any, ...]] | None:
    """Return the section of each block, and what follows the last one.

    Args:
        trace: A forward.
        blocks: Names in the order in which the forward calls them.

    Returns:
        None if the forward does not call each block once, in order.
    """
    known = set(blocks)
    order = [(event.kind, event.name) for event in trace.events if event.name in known and event.kind != "op"]
    once = [(kind, name) for name in blocks for kind in ("enter", "leave")]
    return _Divider(trace, blocks).divide() if order == once else None


class _Divider:
    """Names tensors by the place where they were made."""

    def __init__(self, trace: ForwardTrace, blocks: Sequence[str]) -> None:
        self._trace = trace
        self._names = list(blocks)
        self._made: dict[int, tuple[int, str, int]] = {}
        """By storage: the section and the part of it that made it, and its number there."""
        self._counts: Counter[tuple[int, str]] = Counter()
        self._given: dict[int, int] = {}
        """Storages that no operation made, by order of appearance."""
        self._now = 0
        """The section."""
        self._part = "before"
        self._inputs: dict[int, int] = {}

    def divide(self) -> tuple[list[Section], tuple[Any, ...]]:
        """Return all sections and the rest."""
        known = set(self._names)
        divided: list[Section] = []
        parts: dict[str, list[Any]] = {"before": [], "inside": []}
        for event in self._trace.events:
            if event.kind == "op":
                parts[self._part].append(self._operation(event))
            elif event.name not in known:
                continue
            elif event.kind == "enter":
                parts["before"].append(tuple(map(self._named, event.values)))
                inputs = [value for value in event.values if isinstance(value, _Tensor)]
                self._inputs = {value.storage: number for number, value in enumerate(inputs)}
                self._part = "inside"
                parts["inside"].append(tuple(map(self._named, event.values)))
            else:
                divided.append(Section(tuple(parts["before"]), tuple(parts["inside"])))
                parts = {"before": [], "inside": []}
                self._part, self._inputs = "before", {}
                self._now += 1
        return divided, tuple(parts["before"])

    def _operation(self, event: _Event) -> tuple[Any, ...]:
        inputs = tuple(map(self._named, event.values))
        for tensor in event.made:
            if not (tensor.storage in self._made or tensor.storage in self._given):
                where = self._now, self._part
                self._made[tensor.storage] = *where, self._counts[where]
                self._counts[where] += 1
        return event.name, inputs, tuple(map(self._named, event.made))

    def _named(self, value: Any) -> Any:
        return (self._place(value.storage), value.facts) if isinstance(value, _Tensor) else value

    def _place(self, storage: int) -> Any:
        if storage in self._inputs:
            return "input", self._inputs[storage]
        if storage in self._made:
            section, part, number = self._made[storage]
            distance, is_head = self._now - section, not section and part == "before"
            near = distance <= _NEAR and not (is_head and self._now)
            return ("near", distance, part, number) if near else ("far", section, part, number)
        if (name := self._trace.parameters.get(storage)) is not None:
            prefix = f"{self._names[self._now]}." if self._part == "inside" else ""
            is_inside = bool(prefix) and name.startswith(prefix)
            return "parameter", name.removeprefix(prefix) if is_inside else name, is_inside
        return "given", self._given.setdefault(storage, len(self._given))
