"""The operations of a step: the work and saved tensors of each, and the Python frames from which it came."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from axon_nb.plan.hardware import Work
from axon_nb.records.stacks import library_of

_MOVING = ("aten.", "prims.", "rngprims.")
"""Namespaces of the operations whose time is that of the bytes they move, apart from those below."""
_COMPUTING = re.compile(r"aten\.(linalg_|_linalg_|_fft_|_cdist|cdist|_trilinear|.*lstm|.*gru|.*rnn|cholesky|.*solve)")
"""Those that compute more than they move, by other formulas than ours."""
_ALLOCATING = re.compile(r"aten\.(new_)?empty")
_TORCH = Path(torch.__file__).parent
_OPTIM = str(_TORCH / "optim")
_ENGINE = str(_TORCH / "autograd" / "graph.py"), "_engine_run_backward"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments or results."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_back(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def _grouped(first: Any, second: Any, *_: Any, **__: Any) -> int:
    """Each row, or each summand, is in one group."""
    groups = first.shape[0] if first.ndim == second.ndim == 3 else 1
    return int(2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1])


def _grouped_back(first: Any, second: Any, *_: Any, **__: Any) -> int:
    return 2 * _grouped(first, second)


# torch counts only the attention kernels of GPUs, and no grouped products (2.13).
_FORMULAS: Mapping[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_back,
    "aten._grouped_mm": _grouped,
    "aten._scaled_grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
    "transformers.grouped_mm_fallback_backward": _grouped_back,
}


@cache
def does_work(func: Any) -> bool:
    """Whether an operation computes or moves data: views, questions about metadata and bare allocations do not."""
    if func.is_view or _ALLOCATING.match(str(func)):
        return False
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
    return writes or any("Tensor" in str(one.type) for one in func._schema.returns)


def _is_unknown(name: str) -> bool:
    return not name.startswith(_MOVING) or _COMPUTING.match(name) is not None


class OpCounter(TorchDispatchMode):
    """A dispatch mode that counts operations."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        """The phase being counted; empty: counting is off."""
        self.by_phase: dict[str, dict[str, Work]] = {}
        self.saved: Counter[tuple[str, tuple[str, ...]]] = Counter()
        """Bytes saved for backward, by (saving module, modules from whose outputs the tensor was computed)."""
        # A matrix product saves its weight as a view, which is not a parameter.
        self._saved = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._sources: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []  # so that no storage reuses another's address
        self.uses: Counter[int] = Counter()
        """How often the optimizer's step reads each tensor, by id."""
        self.attention: dict[str, list[tuple[int, int]]] = {}
        """By module: bytes of the keys and values of each attention in forward, and of one element."""
        self.unknown: dict[str, float] = {}
        """Bytes that operations move of which only the bytes are known, by name."""
        self.tracker: Any = None
        self._prefix = f"{type(model).__name__}."

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.phase == "forward":
            self._track_sources(tensors_in((args, kwargs)), tensors_in(result))
        if self.phase == "optimizer" and not func.is_view:
            self.uses.update(map(id, tensors_in((args, kwargs))))
        if self.phase and does_work(func):
            place = self.by_phase.setdefault(self.phase, {})
            path = "" if self.phase == "optimizer" else self._module()
            work = work_of(func._overloadpacket, args, kwargs, result)
            place[path] = place.get(path, Work()) + work
            if self.phase == "forward" and "scaled_dot_product" in str(func):
                _, key, value = tensors_in(args[:3])
                self.attention.setdefault(path, []).append((key.nbytes + value.nbytes, key.itemsize))
            if work.bytes and _is_unknown(name := str(func._overloadpacket)):
                self.unknown[name] = self.unknown.get(name, 0.0) + work.bytes
        return result

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that is saved for backward."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._saved:
            self._saved.add(storage._cdata)
            sources = tuple(sorted(self._sources.get(storage._cdata, ())))
            self.saved[self._module(), sources] += storage.nbytes()
        return tensor

    def _track_sources(self, inputs: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        """Record from which modules' outputs tensors are computed."""
        sources: frozenset[str] = frozenset().union(
            *(self._sources.get(one.untyped_storage()._cdata, ()) for one in inputs)
        )
        for tensor in made:
            self._alive.append(tensor)
            if sources:
                self._sources[tensor.untyped_storage()._cdata] = sources

    def note_output(self, name: str, output: Any) -> None:
        """Record the output of a module with own parameters: it becomes the source."""
        for tensor in tensors_in(output):
            self._alive.append(tensor)
            self._sources[tensor.untyped_storage()._cdata] = frozenset((name,))

    def _module(self) -> str:
        """The innermost running module."""
        inside = [str(name) for name in self.tracker.parents if name.startswith(self._prefix)]
        return max(inside, key=len, default=self._prefix)[len(self._prefix) :]


def work_of(packet: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Return the work of one operation.

    Args:
        packet: The operation, without its overload.
        args: Its arguments.
        kwargs: Its arguments by name.
        result: What it returned.
    """
    flops = None
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
    elif (formula := _FORMULAS.get(str(packet))) is not None:
        flops = float(formula(*args, **kwargs))
    if flops is not None:
        return Work(flops, ops=1, attention=flops if "scaled_dot_product" in str(packet) else 0.0)
    return Work(bytes=float(sum(tensor.nbytes for tensor in tensors_in((args, kwargs, result)))), ops=1)


def product_dtype(packet: Any, args: Any) -> str:
    """Return the dtype of a matrix product, ``tf32`` for float32 that a GPU may round to it.

    Args:
        packet: The operation, without its overload.
        args: Its arguments.
    """
    kind = next((tensor.dtype for tensor in tensors_in(args) if tensor.is_floating_point()), torch.float32)
    if kind is not torch.float32:
        return str(kind).removeprefix("torch.")
    if "convolution" in str(packet):
        return "tf32" if torch.backends.cudnn.allow_tf32 else "float32"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


class CallStack:
    """Finds frames by the kind of their code.

    Args:
        kind_of: Returns the kind of a code object; empty: its frames are passed over. Asked once per code object.
        most: Frames to look at; None: all.
    """

    def __init__(self, kind_of: Callable[[CodeType], str], most: int | None = None) -> None:
        self._kind_of, self._most = kind_of, most
        # By identity, because comparing code is slower; holds the code, so that the identity stays unique.
        self._kinds: dict[int, tuple[str, CodeType]] = {}

    def frames(self) -> Iterator[tuple[str, FrameType]]:
        """Yield the kinds of the running frames with the frames, the innermost first."""
        frame: FrameType | None = sys._getframe(1)
        kinds, left = self._kinds, self._most
        while frame is not None and left != 0:
            code = frame.f_code
            found = kinds.get(id(code))
            if found is None:
                found = kinds[id(code)] = self._kind_of(code), code
            if found[0]:
                yield found[0], frame
            frame = frame.f_back
            if left is not None:
                left -= 1


def phase_or_user(code: CodeType) -> str:
    """``user``, a phase that a function of torch begins, ``end`` of the stack, or empty."""
    name = code.co_filename
    if name.startswith(_OPTIM):
        return "optimizer"
    if (name, code.co_name) == _ENGINE:
        return "backward"
    if code.co_name == "run_rank" and name.endswith("rank.py"):
        return "end"
    return "" if library_of(name) else "user"
