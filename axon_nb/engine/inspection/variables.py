"""Describes the user's variables on this rank, with digests that show whether ranks hold equal values.

<<<<<<< HEAD
For a comparison in the notebook, which has no torch, a variable is returned as named arrays.
=======
A value is taken apart down to its leaves: numbers, text, and the memory of arrays. The digest of each part is computed
here, so that two ranks are compared without moving what they hold; only the leaves that differ are sent, as arrays.
What has no faithful form (a lock, a generator, a shard) is named, and never counts as equal.
>>>>>>> data
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
<<<<<<< HEAD
from axon_nb.engine.sharding.sharded import format_placement, is_dtensor
from axon_nb.records.protocol.inspection import VariableFacts, VariableParts
from axon_nb.shell.foreign_arrays import array_device, as_numpy

__all__ = ["variable_facts", "variable_parts"]
=======
from axon_nb.engine.sharding.sharded import device_mesh_type, format_placement, is_dtensor
from axon_nb.records.placement import MeshInfo
from axon_nb.records.protocol.inspection import VariableFacts, VariablePart, VariableTree
from axon_nb.shell.foreign_arrays import array_device, as_numpy

if TYPE_CHECKING:
    from axon_nb.engine.values.digests import Walk

__all__ = ["own_mesh", "variable_facts", "variable_parts", "variable_tree"]
>>>>>>> data

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
<<<<<<< HEAD
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
=======
        return {}
    return _walk(name, variables[name], wanted=frozenset(nodes)).found


def own_mesh() -> MeshInfo | None:
    """The mesh among the user's variables; None if there is none.

    If there are several: the one named ``mesh``, else the one with the most ranks, else with the most axes.
    """
    kind: Any = device_mesh_type()
    space = list(current().kernel.shell.user_ns.items())  # a copy: a cell may be adding names
    meshes: dict[str, Any] = {
        name: value for name, value in space if isinstance(value, kind) and value.ndim and not name.startswith("_")
    }
    if not meshes:
        return None
    name = max(meshes, key=lambda key: (key == "mesh", meshes[key].mesh.numel(), meshes[key].mesh.ndim))
    mesh = meshes[name]
    axes = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.mesh.ndim))
    return MeshInfo(
        name=name,
        axes=tuple(axes),
        shape=tuple(int(size) for size in mesh.mesh.shape),
        ranks=tuple(int(rank) for rank in mesh.mesh.flatten().tolist()),
    )
>>>>>>> data
