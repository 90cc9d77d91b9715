"""Splits a value into parts of about equal size, and joins parts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from axon_nb.errors import UsageError

__all__ = ["join_values", "split_value"]

_SEQUENCES = (list, tuple, range, str, bytes)


def split_value(value: Any, count: int, *, dim: int = 0, name: str = "the value") -> list[Any]:
    """Split a value into `count` contiguous parts without copying arrays; if uneven, the first ones are longer by one.

    Args:
        value: A tensor, an array, a table, or a Python sequence.
        count: Number of parts.
        dim: Dimension of a tensor or an array to split along.
        name: The value's name in messages.

    Raises:
        UsageError: it has no such dimension, or its type cannot be split.
    """
    if _is_table(value) or isinstance(value, _SEQUENCES):
        if dim:
            raise UsageError(f"--dim {dim}: {name} has type {type(value).__name__}; only --dim 0 is possible.")
        rows = value.iloc if _is_table(value) else value
        return [rows[start:end] for start, end in _bounds(len(value), count)]
    if _is_array(value) or _is_tensor(value):
        if not -value.ndim <= dim < value.ndim:
            raise UsageError(f"--dim {dim}: {name} has {value.ndim} dimension{'' if value.ndim == 1 else 's'}.")
        before = (slice(None),) * (dim % value.ndim)
        return [value[(*before, slice(start, end))] for start, end in _bounds(value.shape[dim], count)]
    raise UsageError(
        f"{name} has type {type(value).__name__}: only tensors, arrays, tables and sequences can be split. "
        "Use `%push` to send all of it to each rank."
    )


def join_values(parts: Sequence[Any], *, dim: int = 0) -> Any:
    """Join parts: tensors and arrays along `dim`, tables by rows, lists and tuples end to end; others become a list.

    Raises:
        UsageError: their shapes do not match.
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
        raise UsageError(f"Cannot join parts of shapes {shapes} along dimension {dim}: {error}") from None
    if _is_table(first):
        return sys.modules["pandas"].concat(list(parts))
    if isinstance(first, (list, tuple)):
        return type(first)(itertools.chain.from_iterable(parts))
    return list(parts)


def _bounds(length: int, count: int) -> list[tuple[int, int]]:
    size, num_longer = divmod(length, count)
    starts = [index * size + min(index, num_longer) for index in range(count + 1)]
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
