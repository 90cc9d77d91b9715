"""What ranks pass to a collective, as one number per call: whether two ranks pass the same is one comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.records.waits.functions import PUBLIC_NAMES

_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(dict.fromkeys(_DTYPES), start=1)}
_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in _DTYPE_CODES.items()}

# What must be equal on all ranks: the number of elements and their dtype, or only the number of bytes. It is taken from
# the argument that holds one rank's share. For rooted operations the root must be equal, too.
_OUTPUT, _INPUT = 0, 1
_SIZES = (1 << 34) - 1
_DTYPE_AT, _REDUCE_AT, _ROOT_AT, NAME_AT = 34, 41, 45, 56
REDUCTIONS, ROOTS = 0xF << _REDUCE_AT, 0x7FF << _ROOT_AT
_REDUCE_NAMES = list(dist.ReduceOp.RedOpType.__members__)
_KNOWN_REDUCTIONS = list(dist.ReduceOp.RedOpType.__members__.values())
_REDUCED = {
    "_reduce_scatter_base": _OUTPUT,
    "allreduce": _OUTPUT,
    "allreduce_coalesced": _OUTPUT,
    "reduce": _OUTPUT,
    "reduce_scatter": _OUTPUT,
    "reduce_scatter_single": _OUTPUT,
    "reduce_scatter_single_coalesced": _OUTPUT,
    "reduce_scatter_tensor_coalesced": _OUTPUT,
}
_COPIED = {
    "_allgather_base": _INPUT,
    "all_gather_single": _INPUT,
    "all_gather_single_coalesced": _INPUT,
    "allgather": _INPUT,
    "allgather_into_tensor_coalesced": _INPUT,
    "broadcast": _OUTPUT,
    "gather": _INPUT,
    "scatter": _OUTPUT,
}
_ROOTED = frozenset({"broadcast", "gather", "reduce", "scatter"})
_CODES = {
    name: code for code, name in enumerate(sorted({*_REDUCED, *_COPIED, "all_to_all_single", "alltoall_base"}), 1)
}
CALL_NAMES = {code: PUBLIC_NAMES.get(name, name) for name, code in _CODES.items()}
SPLIT_CALLS = {name: _CODES[name] << NAME_AT for name in ("all_to_all_single", "alltoall_base")}
"""Operations that may have splits, and the entry of one whose sizes are compared pair by pair."""
_COMPARED = {
    name: (position, _CODES[name] << NAME_AT, name in _REDUCED, name in _ROOTED)
    for name, position in [*_REDUCED.items(), *_COPIED.items(), *((name, _INPUT) for name in SPLIT_CALLS)]
}
"""By operation: position of the argument, shifted code, whether the dtype counts, and whether the root does."""


def encode(name: str, args: tuple[Any, ...]) -> int:
    """Encode what one rank passes to a collective; 0: it is not compared.

    From the highest bit: operation (7 bits), root + 1 (11), what it reduces with + 1 (4), dtype (7), number of elements
    or bytes (34).
    """
    known = _COMPARED.get(name)
    if known is None:
        return 0
    position, code, typed, rooted = known
    value = args[position] if len(args) > position else None
    if name in SPLIT_CALLS and (len(args) < 4 or args[2] or args[3]):
        return 0  # each pair of ranks may have its own size
    more = 0
    if isinstance(value, (list, tuple)):
        if not value:
            return 0
        more = sum(item.numel() if typed else item.nbytes for item in value[1:])
        value = value[0]
    if not isinstance(value, torch.Tensor):
        return 0
    if rooted:
        code |= ((1 + int(getattr(args[-1], "rootRank", -1))) & 0x7FF) << _ROOT_AT
    if typed:
        code |= ((1 + _reduction(args[-1])) << _REDUCE_AT) & REDUCTIONS
        return code | (_DTYPE_CODES.get(value.dtype, 0) << _DTYPE_AT) | (value.numel() + more & _SIZES)
    return code | (value.nbytes + more & _SIZES)


def _reduction(options: Any) -> int:
    """Return the number of the `ReduceOp` in an operation's options; -1 if there is none."""
    reduction = getattr(options, "reduceOp", None)
    # `int(reduction.op)` takes ten times as long.
    return next((number for number, known in enumerate(_KNOWN_REDUCTIONS) if reduction == known), -1)


def describe_entry(entry: int, ranks: Sequence[int]) -> str:
    """Describe an entry, such as ``4 float32`` or ``16 bytes with root rank 0``."""
    size, dtype = entry & _SIZES, (entry >> _DTYPE_AT) & 0x7F
    reduction, root = (entry & REDUCTIONS) >> _REDUCE_AT, (entry & ROOTS) >> _ROOT_AT
    text = f"{size:,} {_NAMES.get(dtype, 'bytes') if dtype else 'bytes'}"
    text += f" with ReduceOp.{_REDUCE_NAMES[reduction - 1]}" if reduction else ""
    return f"{text} with root rank {ranks[root - 1]}" if 0 < root <= len(ranks) else text


def split_bytes(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the bytes of each rank's part of an all_to_all's tensor; without splits they are equal."""
    if not splits:
        return [tensor.nbytes // size] * size
    row = tensor.nbytes // max(1, tensor.shape[0])
    return [count * row for count in splits]
