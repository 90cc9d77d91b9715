"""Splits a value into parts of about equal size, and joins parts.

A part has the class, the attributes and the mask of the whole, and the whole those of its parts. What cannot be split
so is refused, and what cannot be joined so becomes a list.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from axon_nb.errors import UsageError

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
    if _is_table(value) or type(value) in _SEQUENCES:
        if dim:
            raise UsageError(f"--dim {dim}: {name} has type {type(value).__name__}; only --dim 0 is possible.")
        rows = value.iloc if hasattr(value, "iloc") else value
        return [rows[start:end] for start, end in _bounds(len(value), count)]
    if _is_array(value) or _is_tensor(value):
        if not -value.ndim <= dim < value.ndim:
            raise UsageError(f"--dim {dim}: {name} has {value.ndim} dimension{'' if value.ndim == 1 else 's'}.")
        before = (slice(None),) * (dim % value.ndim)
        plain = _plain(value)
        return [_like(value, plain[(*before, slice(start, end))]) for start, end in _bounds(value.shape[dim], count)]
    kind = type(value).__name__
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        layout = str(value.layout).removeprefix("torch.")
        layout = "quantized" if value.is_quantized else "nested" if value.is_nested else layout
        kind = f"{kind} ({layout})"
    raise UsageError(
        f"{name} has type {kind}: only dense tensors, arrays, tables and sequences can be split. "
        "Use `%push` to send all of it to each rank."
    )


def join_values(parts: Sequence[Any], *, dim: int = 0) -> Any:
    """Join parts: tensors and arrays along `dim`, tables by rows, lists and tuples end to end; others become a list.

    Raises:
        UsageError: their shapes do not match.
    """
    first = parts[0]
    if any(_class(part) != _class(first) for part in parts):
        return list(parts)
    if _is_table(first):
        return _join_tables(parts)
    if type(first) in (list, tuple):
        return type(first)(itertools.chain.from_iterable(parts))
    if not (_is_array(first) or _is_tensor(first)):
        return list(parts)
    if not all(_is_tensor(part) or _is_array(part) for part in parts) or not _alike(parts):
        return list(parts)
    join = _joins(first)[0 if first.ndim else 1]
    try:
        joined = join([_plain(part) for part in parts], dim if first.ndim else 0)
    except (IndexError, RuntimeError, TypeError, ValueError):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(
            f"Cannot join parts of shapes {shapes} along dimension {dim}: all other dimensions must be equal. Use "
            "`%pull` to fetch them as they are."
        ) from None
    return _like(first, joined, requires_grad=all(getattr(part, "requires_grad", False) for part in parts))


def _bounds(length: int, count: int) -> list[tuple[int, int]]:
    size, num_longer = divmod(length, count)
    starts = [index * size + min(index, num_longer) for index in range(count + 1)]
    return list(itertools.pairwise(starts))


def _class(value: Any) -> Any:
    """Its class; one of a cell, which each rank has defined for itself, by name."""
    kind = type(value)
    return kind if kind.__module__ != "__main__" else kind.__qualname__


def _join_tables(parts: Sequence[Any]) -> Any:
    pandas = sys.modules["pandas"]
    first = parts[0]
    if isinstance(first, (pandas.DataFrame, pandas.Series)):
        is_alike = all(_facts(part)[0] == _facts(first)[0] for part in parts)
        dtypes = zip(*(_facts(part)[1] for part in parts), strict=is_alike)
        is_kept = all(len(set(kinds)) == 1 or all(map(pandas.api.types.is_numeric_dtype, kinds)) for kinds in dtypes)
        return pandas.concat(list(parts)) if is_alike and is_kept else list(parts)
    if isinstance(first, pandas.Index):
        joined = first.append(list(parts[1:]))
    else:
        joined = pandas.concat([pandas.Series(part) for part in parts], ignore_index=True).array
    return joined if joined.dtype == first.dtype else list(parts)


def _facts(table: Any) -> tuple[Any, list[Any]]:
    """What tables must have in common to be joined, and the dtypes of their columns, of which numbers may differ."""
    names = list(table.columns) if table.ndim == 2 else [table.name]
    facts = names, list(table.index.names), _identity(table.attrs)
    return facts, list(table.dtypes) if table.ndim == 2 else [table.dtype]


def _joins(first: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if _is_tensor(first):
        torch = sys.modules["torch"]
        return torch.cat, torch.stack
    numpy = sys.modules["numpy"]
    module = numpy.ma if isinstance(first, numpy.ma.MaskedArray) else numpy
    return module.concatenate, module.stack


def _plain(value: Any) -> Any:
    """Return a tensor without class, attributes and history, or an array without its class; both share its memory."""
    if _is_tensor(value):
        return value.detach().as_subclass(sys.modules["torch"].Tensor)
    numpy = sys.modules["numpy"]
    return value if isinstance(value, numpy.ma.MaskedArray) else value.view(numpy.ndarray)


def _like(value: Any, plain: Any, *, requires_grad: bool | None = None) -> Any:
    """Return what `_plain` has made a part or a whole of, as one of the class of `value`, with its attributes."""
    from axon_nb.shell.value_pickle import dressed

    if _is_tensor(value):
        wanted = value.requires_grad and value.is_leaf if requires_grad is None else requires_grad
        return dressed(plain, type(value), vars(value), requires_grad=wanted)
    if isinstance(value, sys.modules["numpy"].ma.MaskedArray):
        plain.fill_value = value.fill_value
        return plain.harden_mask() if value.hardmask else plain
    if type(value) is not type(plain):
        plain = plain.view(type(value))
        vars(plain).update(_attributes(value))
    return plain


def _attributes(value: Any) -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.memmap, numpy.ma.MaskedArray)):
        return {}
    return getattr(value, "__dict__", {})


def _alike(parts: Sequence[Any]) -> bool:
    """Whether all have the same attributes, so that the whole can have them."""
    return len({_identity(_attributes(part)) for part in parts}) == 1


def _identity(attributes: Any) -> bytes:
    """Return what is equal for equal attributes."""
    if not attributes:
        return b""
    import cloudpickle

    return bytes(cloudpickle.dumps(attributes))


def _is_tensor(value: Any) -> bool:
    """Whether this is a tensor that is what lies in its memory, or has none (on the device meta)."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    from axon_nb.shell.value_pickle import is_dense

    return is_dense(value) or (value.is_meta and type(value) in (torch.Tensor, torch.nn.Parameter))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_table(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return False
    return isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray))
