"""Patches for models on fake tensors: lazy chunks (FSDP reads only two), `model.to(dtype)`, no weight initialization.

Also builds models that request CUDA where there is none. There, a fake tensor on ``cuda`` aborts the process (torch
2.11 to 2.13: "Cannot initialize CUDA without ATen_cuda library", from C++). A plan depends only on shapes and dtypes,
so such requests get the available device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional, init
from torch.overrides import TorchFunctionMode

from axon_nb.parallel import experts

_MODULE, _NAME = "torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty"
_GROUPED = "_meta_grouped_mm_common"
_MASKS, _PACKED = "transformers.masking_utils", "find_packed_sequence_indices"
_OTHER_DEVICES = ("cpu", "meta")
_ATTENTION: Any = functional.scaled_dot_product_attention


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Inside, torch logs no traceback when an operation does not fit its fake tensors: the exception says it."""
    with replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True):
        yield


class _Chunks:
    """The result of `torch.chunk`, padded with empty tensors to `num_chunks`; each chunk is made on access.

    Args:
        tensor: The tensor to split.
        num_chunks: Number of chunks.
        dim: Dimension to split along.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> torch.Tensor:
        if not 0 <= number < self._count:
            raise IndexError(number)
        whole = self._tensor.shape[self._dim]
        size = -(-whole // self._count)
        start = number * size
        if number and start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, whole - start))


@contextlib.contextmanager
def lazy_chunks() -> Iterator[None]:
    """Inside, FSDP makes only the chunks of a parameter that it reads.

    torch makes one per rank, twice per parameter: on 1024 ranks that took nine tenths of a plan's time (2.11 to 2.13).
    """
    module = importlib.import_module(_MODULE)
    with replaced(module, _NAME, _Chunks) if hasattr(module, _NAME) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def patched_apply() -> Iterator[None]:
    """Inside, methods such as `to` and `half` replace a module's parameters.

    `nn.Module._apply` swaps fake tensors with their results, which fails because torch itself holds weak references to
    them ("Cannot swap t1 because it has weakref associated with it", torch 2.13).
    """
    made: dict[int, tuple[Any, Any]] = {}
    deep = 0

    def of(tensor: Any, call: Callable[[Any], Any]) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in made:  # a tensor shared by modules stays shared
            with torch.no_grad():
                value = call(tensor)
            if isinstance(tensor, nn.Parameter) and value is not tensor:
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            made[id(tensor)] = tensor, value
        return made[id(tensor)][1]

    def apply(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        nonlocal deep
        deep += 1
        try:
            for child in module.children() if recurse else ():
                child._apply(fn)
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    tensors[name] = of(tensor, fn)
        finally:
            deep -= 1
            if not deep:
                made.clear()
        return module

    with replaced(nn.Module, "_apply", apply):
        yield


@contextlib.contextmanager
def skip_init() -> Iterator[None]:
    """Inside, the functions of `torch.nn.init` return the tensor unchanged.

    There are no values to set, yet filling a fake tensor takes as long as any operation on it; some functions, such as
    `orthogonal_`, would allocate others.
    """
    fills = {name: value for name, value in vars(init).items() if name.endswith("_") and not name.startswith("_")}
    vars(init).update(dict.fromkeys(fills, _unchanged))
    try:
        yield
    finally:
        vars(init).update(fills)


def _unchanged(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def as_with_data() -> Iterator[None]:
    """Inside, models of transformers take the path that they take with data.

    On fake tensors transformers 5 makes a mask of all pairs of positions, because several samples might be packed into
    one; it also copies keys and values for each query head. Grouped products take any dtype, which torch's shape
    function does not (2.13). Attention whose values have fewer features than its keys, as DeepSeek's, stays one kernel.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_PaddedValues())
        stack.enter_context(even_experts())
        products: Any = importlib.import_module("torch._meta_registrations")
        common = getattr(products, _GROUPED, None)
        if common is not None:
            stack.enter_context(replaced(products, _GROUPED, functools.partial(_grouped_product, common)))
        if "transformers" in sys.modules and importlib.util.find_spec(_MASKS) is not None:
            masks = importlib.import_module(_MASKS)
            if hasattr(masks, _PACKED):
                stack.enter_context(replaced(masks, _PACKED, lambda *_, **__: None))
        yield


@contextlib.contextmanager
def even_experts() -> Iterator[None]:
    """Inside, `Experts` get equally many tokens, and drop none: which ones they would get depends on values."""

    def loads(expert: torch.Tensor, count: int) -> torch.Tensor:
        return expert.new_full((count,), len(expert) // count)

    def sizes(counts: torch.Tensor, expected: int) -> list[int]:
        return [expected // len(counts) + (place < expected % len(counts)) for place in range(len(counts))]

    with (
        replaced(experts, "_loads", loads),
        replaced(experts, "_sizes", sizes),
        replaced(experts.Experts, "_within_capacity", lambda _, order, *__: order),
        replaced(experts.Experts, "_initialize", lambda *_: None),
    ):
        yield


def _grouped_product(common: Callable[..., Any], mat_a: torch.Tensor, mat_b: torch.Tensor, **options: Any) -> Any:
    if options.get("scale_a") is not None or mat_a.dtype == torch.bfloat16:
        return common(mat_a, mat_b, **options)
    return common(mat_a.to(torch.bfloat16), mat_b.to(torch.bfloat16), **options).to(mat_a.dtype)


class _PaddedValues(TorchFunctionMode):
    """Inside, attention pads values to the features of keys: the kernel of CPUs needs as many, those of GPUs do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function."""
        kwargs = kwargs or {}
        if func is _ATTENTION and len(args) >= 3:
            features = args[2].shape[-1]
            if (more := args[1].shape[-1] - features) > 0:
                return func(*args[:2], functional.pad(args[2], (0, more)), *args[3:], **kwargs)[..., :features]
        return func(*args, **kwargs)


class WithoutCuda(TorchFunctionMode):
    """Inside, moves to CUDA are ignored, and new tensors are made on the default device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function with any CUDA device removed."""
        kwargs = dict(kwargs or {})
        device = args[0].device if args and isinstance(args[0], torch.Tensor) else None
        if func is torch.Tensor.cuda:
            return args[0]
        if device is not None and func is torch.Tensor.to and len(args) > 1 and is_cuda(args[1]):
            args = (args[0], device, *args[2:])
        if is_cuda(kwargs.get("device")):
            del kwargs["device"]
            if device is not None:
                kwargs["device"] = device
        return func(*args, **kwargs)


def is_cuda(device: Any) -> bool:
    """Whether a device, its name or its number is a GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    if isinstance(device, str):
        device = torch.device(device)
    return isinstance(device, torch.device) and device.type not in _OTHER_DEVICES
