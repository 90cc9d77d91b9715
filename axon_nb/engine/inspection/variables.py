"""Describes the user's variables on this rank, with digests that show whether ranks hold equal values.

A value is taken apart down to its leaves: numbers, text, and the memory of arrays. The digest of each part is computed
here, so that two ranks are compared without moving what they hold; only the leaves that differ are sent, as arrays.
What has no faithful form (a lock, a generator, a shard) is named, and never counts as equal.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from axon_nb.comm.placements import placed
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import format_placement, is_dtensor
from axon_nb.records.protocol.inspection import VariableFacts, VariablePart, VariableTree
from axon_nb.shell.foreign_arrays import array_device, as_numpy

if TYPE_CHECKING:
    from axon_nb.engine.values.digests import Walk

_MAX_DIGEST = 1 << 30
"""Largest variable, in bytes, that a table of all variables compares."""
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def _walk(name: str, value: Any, **options: Any) -> Walk:
    from axon_nb.engine.values.digests import Walk  # the first who asks pays for it

    walk = Walk(name, **options)
    walk.run(value)
    return walk


def variable_facts() -> list[VariableFacts]:
    """One record per variable."""
    records, began = [], time.monotonic()
    for name, value in user_variables(current().kernel.shell).items():
        if isinstance(value, (type, ModuleType)) or (name == "mesh" and value is None):
            continue
        walk = _walk(name, value, began=began, max_bytes=_MAX_DIGEST)
        unchecked = "; ".join(f"{path} ({why})" if path != name else why for path, why in walk.named_skips())
        facts: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # unusual objects have no shape
            facts = _facts(value)
        digest = "" if walk.skipped.get(0) else walk.digests[:16].hex()
        records.append(VariableFacts(name, type(value).__name__, digest=digest, unchecked=unchecked, **facts))
    return records


def _facts(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return _tensor_facts([value], shape=_shape(value))
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        count = sum(tensor.numel() for tensor in tensors)
        return _tensor_facts(tensors, shape=f"{count:,} parameters" if tensors else "")
    if isinstance(value, torch.optim.Optimizer):
        state = [item for entry in value.state.values() for item in entry.values() if isinstance(item, torch.Tensor)]
        return _tensor_facts(state, shape=f"{len(state)} tensors of state")
    numpy, pandas = sys.modules.get("numpy"), sys.modules.get("pandas")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return {"shape": _shape(value), "dtype": str(value.dtype), "bytes": value.nbytes}
    if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series)):
        size = value.memory_usage(deep=True)
        return {"shape": _shape(value), "bytes": int(getattr(size, "sum", lambda: size)())}
    if (device := array_device(value)) is not None:
        array = value if hasattr(value, "dtype") else as_numpy(value)
        size = int(getattr(value, "nbytes", 0))
        return {"shape": _shape(array), "dtype": str(array.dtype), "device": device, "bytes": size}
    if type(value) in _SCALARS:
        return {
            "shape": repr(value[:40] if isinstance(value, (str, bytes)) else value)[:40],
            "bytes": sys.getsizeof(value),
        }
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return {"shape": f"{len(value)} items", "bytes": sys.getsizeof(value)}
    return {}


def _shape(value: Any) -> str:
    from axon_nb.engine.values.parts import shape_of

    return shape_of(value)


def _tensor_facts(tensors: list[Any], *, shape: str) -> dict[str, Any]:
    known = [found for tensor in tensors if (found := placed(tensor)) is not None]
    local = [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]
    where = dict.fromkeys(", ".join(map(format_placement, found.placements)) for found in known)
    return {
        "shape": shape,
        "dtype": ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        "device": ", ".join(dict.fromkeys(str(tensor.device) for tensor in local)),
        "where": "; ".join(where),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in local),
    }


def variable_tree(name: str) -> VariableTree:
    """The digests of a variable and of all its parts."""
    variables = user_variables(current().kernel.shell)
    if name not in variables:
        return VariableTree(refused="has no such variable")
    walk = _walk(name, variables[name])
    return VariableTree(
        digests=bytes(walk.digests),
        heads=bytes(walk.heads),
        labels=bytes(walk.labels),
        ends=struct.pack(f"<{len(walk.ends)}q", *walk.ends),
        skipped={index: why for index, (_, why) in walk.skipped.items()},
        paths={index: path for index, (path, _) in walk.skipped.items()},
    )


def variable_parts(name: str, nodes: tuple[int, ...]) -> dict[int, VariablePart]:
    """Some parts of a variable, by their numbers in its tree."""
    variables = user_variables(current().kernel.shell)
    if name not in variables:
        return {}
    return _walk(name, variables[name], wanted=frozenset(nodes)).found
