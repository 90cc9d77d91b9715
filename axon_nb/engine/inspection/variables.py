"""Describes the user's variables on this rank, with digests that show whether ranks hold equal values.

For a comparison in the notebook, which has no torch, a variable is returned as named arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from types import ModuleType
from typing import Any

import torch

from axon_nb.comm.placements import placed
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import format_placement, is_dtensor
from axon_nb.records.protocol.inspection import VariableFacts, VariableParts
from axon_nb.shell.foreign_arrays import array_device, as_numpy

__all__ = ["variable_facts", "variable_parts"]

_MAX_DIGEST = 1 << 30
"""Largest variable, in bytes, for which a digest is computed; larger ones are not compared."""
_MAX_REPR = 10_000
_MAX_BYTES = 1 << 28
_MAX_TEXT = 400


def variable_facts() -> list[VariableFacts]:
    """One record per variable."""
    records = []
    for name, value in user_variables(current().kernel.shell).items():
        if isinstance(value, (type, ModuleType)) or (name == "mesh" and value is None):
            continue
        with contextlib.suppress(Exception):  # unusual objects are left out
            records.append(VariableFacts(name, type(value).__name__, **_facts(value)))
    return records


def _facts(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return _tensor_facts([value], shape=_shape(value.shape))
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        count = sum(tensor.numel() for tensor in tensors)
        return _tensor_facts(tensors, shape=f"{count:,} parameters" if tensors else "")
    if isinstance(value, torch.optim.Optimizer):
        state = [item for entry in value.state.values() for item in entry.values() if isinstance(item, torch.Tensor)]
        return _tensor_facts(state, shape=f"{len(state)} tensors of state")
    numpy, pandas = sys.modules.get("numpy"), sys.modules.get("pandas")
    if numpy is not None and isinstance(value, numpy.ndarray):
        digest = "" if value.dtype.hasobject else _digest([value.tobytes()]) if value.nbytes <= _MAX_DIGEST else ""
        return _record(shape=_shape(value.shape), dtype=str(value.dtype), size=value.nbytes, digest=digest)
    if (device := array_device(value)) is not None:
        return _array_facts(value, device)
    if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series)):
        digest = _digest([pandas.util.hash_pandas_object(value).to_numpy().tobytes()])
        size = value.memory_usage(deep=True)
        return _record(shape=_shape(value.shape), size=int(getattr(size, "sum", lambda: size)()), digest=digest)
    if _is_plain(value):
        text = repr(value)
        shape = f"{len(value)} items" if isinstance(value, (list, tuple, dict, set, frozenset)) else text[:40]
        digest = _digest([text.encode()]) if len(text) <= _MAX_REPR and not isinstance(value, (set, frozenset)) else ""
        return _record(shape=shape, size=sys.getsizeof(value), digest=digest)
    return _record()


def _array_facts(value: Any, device: str) -> dict[str, Any]:
    """Describe an array of another library, such as CuPy's."""
    size = int(getattr(value, "nbytes", 0))
    array = as_numpy(value) if size <= _MAX_DIGEST else None
    shape, dtype = (value.shape, value.dtype) if array is None else (array.shape, array.dtype)
    digest = "" if array is None else _digest([array.tobytes()])
    return _record(shape=_shape(shape), dtype=str(dtype), device=device, size=size, digest=digest)


def _shape(shape: Any) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _tensor_facts(tensors: list[Any], *, shape: str) -> dict[str, Any]:
    known = [found for tensor in tensors if (found := placed(tensor)) is not None]
    local = [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]
    size = sum(tensor.numel() * tensor.element_size() for tensor in local)
    is_replicated = all(found.is_replicated for found in known)
    where = dict.fromkeys(", ".join(map(format_placement, found.placements)) for found in known)
    return _record(
        shape=shape,
        dtype=", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        device=", ".join(dict.fromkeys(str(tensor.device) for tensor in local)),
        where="; ".join(where),
        size=size,
        digest=_digest(map(_tensor_bytes, local)) if is_replicated and local and size <= _MAX_DIGEST else "",
    )


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().cpu().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # one element may have any stride
    return bytes(flat.view(torch.uint8).numpy()) if dense.numel() else b""


def _digest(parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _is_plain(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return True
    if type(value) in (list, tuple, set, frozenset):
        return len(value) <= _MAX_REPR and all(map(_is_plain, value))
    return type(value) is dict and all(_is_plain(key) and _is_plain(item) for key, item in value.items())


def _record(
    *, shape: str = "", dtype: str = "", device: str = "", where: str = "", size: int = 0, digest: str = ""
) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, "device": device, "where": where, "bytes": size, "digest": digest}


def variable_parts(name: str) -> VariableParts:
    """The parts of a variable to compare; for a module its parameters and buffers."""
    variables = user_variables(current().kernel.shell)
    if name not in variables:
        return VariableParts({}, refused="has no such variable")
    value = variables[name]
    if isinstance(value, torch.Tensor):
        return _arrays({"": value})
    if isinstance(value, torch.nn.Module):
        return _arrays({**dict(value.named_parameters()), **dict(value.named_buffers())})
    numpy, pandas = sys.modules.get("numpy"), sys.modules.get("pandas")
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return VariableParts({"": value})
    if array_device(value) is not None:
        if (size := int(getattr(value, "nbytes", 0))) > _MAX_BYTES:
            return VariableParts({}, refused=_too_large(size))
        return VariableParts({"": as_numpy(value)})
    if pandas is not None and isinstance(value, pandas.DataFrame):
        return VariableParts({f"column {column}": value[column].to_numpy() for column in value.columns})
    try:
        text = repr(value)
    except Exception as error:
        return VariableParts({}, refused=f"cannot be shown: {type(error).__name__}")
    # Equal beginnings are not equal values.
    rest = f"… ({len(text):,} characters, digest {_digest([text.encode()])})" if len(text) > _MAX_TEXT else ""
    return VariableParts({}, text=text[:_MAX_TEXT] + rest)


def _too_large(size: int) -> str:
    return f"has {size >> 20} MiB; at most {_MAX_BYTES >> 20} MiB can be compared. Name a part of it"


def _arrays(tensors: dict[str, Any]) -> VariableParts:
    if any((found := placed(tensor)) is not None and not found.is_replicated for tensor in tensors.values()):
        return VariableParts({}, refused="is sharded: each rank holds its own part")
    local = {name: (t.to_local() if is_dtensor(t) else t).detach().cpu() for name, t in tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in local.values())
    if size > _MAX_BYTES:
        return VariableParts({}, refused=_too_large(size))
    # NumPy has neither bfloat16 nor float8.
    plain = {name: t if t.dtype.itemsize > 2 or not t.is_floating_point() else t.float() for name, t in local.items()}
    return VariableParts({name: tensor.numpy() for name, tensor in plain.items()})
