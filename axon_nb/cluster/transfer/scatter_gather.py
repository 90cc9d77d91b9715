"""Dealing one value out in parts of about equal size, and putting parts together again."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from axon_nb.errors import UsageError

__all__ = ["join_values", "split_value"]

_SEQUENCES = (list, tuple, range, str, bytes)


def split_value(value: Any, count: int, *, dim: int = 0, name: str = "the value") -> list[Any]:
    """`count` neighbouring parts, the first ones longer by one where it does not come out even; no copies of memory.

    Args:
        value: A tensor, an array, a table, or a sequence of Python's.
        count: Number of parts.
        dim: Dimension of a tensor or an array along which it is split.
        name: What messages call it.

    Raises:
        UsageError: it has no such dimension, or is nothing that can be split.
    """
    if _is_table(value) or isinstance(value, _SEQUENCES):
        if dim:
            raise UsageError(f"--dim {dim}: {name} is a {type(value).__name__}, which is split along 0 alone.")
        rows = value.iloc if _is_table(value) else value
        return [rows[start:end] for start, end in _bounds(len(value), count)]
    if _is_array(value) or _is_tensor(value):
        if not -value.ndim <= dim < value.ndim:
            raise UsageError(f"--dim {dim}: {name} has {value.ndim} dimensions.")
        before = (slice(None),) * (dim % value.ndim)
        return [value[(*before, slice(start, end))] for start, end in _bounds(value.shape[dim], count)]
    raise UsageError(
        f"{name} is a {type(value).__name__}: tensors, arrays, tables and sequences can be split; "
        "`%push` sends it whole."
    )


def join_values(parts: Sequence[Any], *, dim: int = 0) -> Any:
    """What the parts make together: tensors and arrays along `dim`, tables by rows, sequences; others as a list.

    Raises:
        UsageError: their shapes do not fit together.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return list(parts)
    try:
        if _is_tensor(first):
            torch = sys.modules["torch"]
            return torch.cat(list(parts), dim) if first.ndim else torch.stack(list(parts))
        if _is_array(first):
            numpy = sys.modules["numpy"]
            return numpy.concatenate(parts, dim) if first.ndim else numpy.stack(parts)
    except (IndexError, RuntimeError, ValueError) as error:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(f"Parts of shapes {shapes} do not fit together along {dim}: {error}") from None
    if _is_table(first):
        return sys.modules["pandas"].concat(list(parts))
    if isinstance(first, (list, tuple)):
        return type(first)(itertools.chain.from_iterable(parts))
    return list(parts)


def _bounds(length: int, count: int) -> list[tuple[int, int]]:
    size, longer = divmod(length, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return list(itertools.pairwise(starts))


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_table(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series))
