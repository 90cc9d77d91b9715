"""A block's signature: all that its modules hold, as values that can be compared with those of another block.

Two blocks have equal signatures if their classes, attributes, parameters, buffers and hooks are equal. What cannot be
compared by value counts as different, unless it is one object that both hold.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

Signature = dict[tuple[Any, ...], Any]
"""Leaves by path. A path says through which attributes a leaf is reached."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_BY_NAME = (type, ModuleType, BuiltinFunctionType, CodeType)
_HEAP_TYPE = 1 << 9
"""Flag of classes that a `class` statement made (Py_TPFLAGS_HEAPTYPE)."""
_TENSORS = ("_parameters", "_buffers", "_modules")
_NUMBERED = "_hooks"
"""In the names of a module's hook dicts, whose keys are numbers that differ for each hook."""


def signatures(
    model: nn.Module, blocks: Sequence[nn.Module], labels: Callable[[nn.Module], Any] | None = None
) -> list[Signature]:
    """Return each block's signature.

    An integer that counts blocks, such as a layer's index, is left out: no two blocks could be equal with it. The
    traced forward shows what a block does with it.

    Args:
        model: The model that contains them.
        blocks: The blocks in order.
        labels: What else distinguishes modules, such as how they are wrapped.
    """
    owners = Counter(id(tensor) for module in model.modules() for tensor in _own_tensors(module))
    readings = [_Reader(block, owners, labels).read() for block in blocks]
    for path in set(readings[0]) if len(readings) > 1 else ():
        values = [one.get(path) for one in readings]
        if all(type(value) is int for value in values) and len(set(values)) > 1:
            offsets = {value - number for number, value in enumerate(values) if isinstance(value, int)}
            if len(offsets) == 1:
                for one in readings:
                    del one[path]
    return readings


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for held in (module._parameters, module._buffers) for tensor in held.values() if tensor is not None]


class _Reader:
    """Reads one block."""

    def __init__(self, block: nn.Module, owners: Mapping[int, int], labels: Callable[[nn.Module], Any] | None) -> None:
        self._inside = {id(module): name for name, module in block.named_modules()}
        self._block = block
        self._owners = owners
        counts = Counter(id(tensor) for module in block.modules() for tensor in _own_tensors(module))
        self._shared = {number for number, count in counts.items() if owners[number] > count}
        self._labels = labels
        self._leaves: Signature = {}
        self._visited: dict[int, tuple[tuple[Any, ...], Any]] = {}  # with the objects, so that no other gets their id

    def read(self) -> Signature:
        """Return all leaves."""
        for name, module in self._block.named_modules():
            self._leaves[name,] = type(module), module.training, self._labels(module) if self._labels else None
            for key, value in vars(module).items():
                if key not in _TENSORS:
                    numbered = _NUMBERED in key and isinstance(value, Mapping)
                    self._add((name, key), list(value.values()) if numbered else value)
            for kind in _TENSORS:
                for key, value in getattr(module, kind).items():
                    self._add((name, kind, key), value)
        return self._leaves

    def _add(self, path: tuple[Any, ...], value: Any) -> None:
        leaf = self._leaf(value)
        if leaf is not None:
            self._leaves[path] = leaf
            return
        if id(value) in self._visited:
            self._leaves[path] = "as", self._visited[id(value)][0]
            return
        self._visited[id(value)] = path, value
        self._leaves[path] = type(value)
        for key, part in _parts(value):
            self._add((*path, key), part)

    def _leaf(self, value: Any) -> Any:
        """Return what stands for a value; None: its parts do."""
        if isinstance(value, _PLAIN):
            return value if type(value) is int else (type(value), value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            inside = self._inside.get(id(value))
            return ("outside", id(value)) if inside is None else ("inside", inside)
        if isinstance(value, _BY_NAME):
            return "same", id(value)
        if isinstance(value, Set):
            return (
                (type(value), frozenset(value))
                if all(isinstance(one, _PLAIN) for one in value)
                else ("object", id(value))
            )
        return None if _has_parts(value) else ("object", id(value))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._shared:
            # A parameter used elsewhere makes a block unlike all others; a buffer may be common to all of them.
            return "shared", id(tensor), isinstance(tensor, nn.Parameter) and id(self._block)
        hooks = getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None)
        shape = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad, type(tensor)
        return "tensor", shape, id(tensor) if any(hooks) else None


def _has_parts(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple | functools.partial | FunctionType | MethodType):
        return True
    # Only objects of classes defined in Python hold their whole state in their attributes.
    return hasattr(value, "__dict__") and all(
        base is object or (base.__flags__ & _HEAP_TYPE and not vars(base).get("__slots__"))
        for base in type(value).__mro__
    )


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return [(("key", _key(key)), part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [("length", len(value)), *enumerate(value)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("func", value.__func__), ("self", value.__self__)]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents if _is_filled(cell) else None for cell in value.__closure__ or ()]
        fields = [("code", value.__code__), ("defaults", value.__defaults__), ("more", value.__kwdefaults__)]
        return [*fields, *enumerate(cells)]
    return [("class", type(value)), *vars(value).items()]


def _key(key: Any) -> Any:
    return key if isinstance(key, _PLAIN) else id(key)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
