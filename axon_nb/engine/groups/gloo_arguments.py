"""Arguments with which Gloo computes what shared memory and NCCL do, where Gloo alone would return other numbers.

Gloo combines bytes in the order in which they lie in memory, whatever their strides. Its maximum and minimum keep or
forget a NaN, depending on the rank that has it. It adds truth values as bytes, until their sum wraps to False. A reduce
overwrites parts of the other ranks' tensors. It has no average of integers, which torch notices when the sum is there.

An operation that needs none of this costs a look at its tensors' strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from axon_nb.comm.errors import TensorError
from axon_nb.comm.shared_memory.segment.pages import note_unlike_gloo

_IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce"})
_MESSAGES = frozenset({"recv", "recv_anysource", "send"})
_SUM, _AVG, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
Args = tuple[Any, ...]
Finish = Callable[[Any], None]


def exact_arguments(name: str, args: Args, finished: Finish, *, rank: int) -> tuple[Args, Finish]:
    """Return the arguments for Gloo, and what to call when the operation has finished: it stores the results.

    Args:
        name: The operation of the group.
        args: Its arguments.
        finished: What would be called.
        rank: This process's rank in the group.

    Raises:
        TensorError: Gloo cannot compute it.
    """
    first = None if name in _MESSAGES else next(_tensors(args[:2]), None)
    if first is None:
        return args, finished
    options = args[-1]
    reduction = getattr(options, "reduceOp", None)
    is_float = first.is_floating_point()
    extreme = next((each for each in (_MAX, _MIN) if is_float and reduction == each), None)
    if reduction is not None and not is_float and not first.is_complex():
        args = (*args[:-1], _for_integers(options, first.dtype))
    spares = name == "reduce" and getattr(options, "rootRank", rank) != rank
    if extreme is None and not spares and all(map(_lies_in_order, _tensors(args[:2]))):
        return args, finished
    stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replace(value: torch.Tensor, is_output: bool) -> torch.Tensor:
        if value.layout is not torch.strided:
            return value
        other = value.detach().contiguous()
        if extreme is not None:
            other = _ordered(other, extreme == _MAX)
        elif spares and other.data_ptr() == value.data_ptr():
            other = other.clone()
        if is_output and other.data_ptr() != value.data_ptr():
            stored.append((value, other))
        return other

    def store(call: Any) -> None:
        with torch.no_grad():
            for tensor, other in stored:
                tensor.copy_(other if extreme is None else _floats(other, tensor.dtype))
        finished(call)

    own = 1 if name in _IN_PLACE else 2  # arguments with tensors; the first has the outputs
    new = [tree_map_only(torch.Tensor, partial(replace, is_output=not at), args[at]) for at in range(own)]
    return (*new, *args[own:]), finished if spares else store


def _for_integers(options: Any, dtype: torch.dtype) -> Any:
    """Return options with which Gloo reduces integers or truth values right.

    Raises:
        TensorError: there are none.
    """
    if options.reduceOp == _AVG:
        raise TensorError(
            f"Gloo has no AVG of {str(dtype).removeprefix('torch.')}, and integers would lose the fraction: reduce a "
            "copy in floats, such as `t.double()`."
        )
    if dtype is not torch.bool or options.reduceOp != _SUM:
        return options
    note_unlike_gloo("", dtype, "SUM")
    changed = type(options)()  # the caller's may be shared by many calls
    for field in ("timeout", "asyncOp", "rootRank", "rootTensor"):
        if hasattr(options, field):
            setattr(changed, field, getattr(options, field))
    changed.reduceOp = _MAX
    return changed


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _lies_in_order(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_contiguous()


def _ordered(tensor: torch.Tensor, largest: bool) -> torch.Tensor:
    """Return integers in the order of the numbers; NaN is the last of them in the direction of the search."""
    wide = tensor if tensor.dtype in _INTEGERS else tensor.float()
    bits = wide.view(_INTEGERS[wide.dtype])
    limits = torch.iinfo(bits.dtype)
    return torch.where(
        wide.isnan(), limits.max if largest else limits.min, torch.where(bits < 0, bits ^ limits.max, bits)
    )


def _floats(ordered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits = torch.where(ordered < 0, ordered ^ torch.iinfo(ordered.dtype).max, ordered)
    return bits.view(torch.float32 if ordered.dtype is torch.int32 else torch.float64).to(dtype)
