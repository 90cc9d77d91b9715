"""How a value is taken apart: into its leaves (numbers, text, the memory of arrays) and what holds them.

Each kind of value has a rule. An object without one is taken apart as pickle does, which is exact or fails. What has no
faithful form raises `CannotCompareError`: it never counts as equal. Rules go by names of classes, so no library is
imported for them.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import struct
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch

from axon_nb.comm.placements import placed
from axon_nb.engine.sharding import is_dtensor, is_sharded
from axon_nb.shell.value_pickle import array_device, as_numpy

_BATCH = 16
"""A longer list of plain values is one leaf."""
SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)})
_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
_NOT_OF_CLASSES = frozenset({"_abc_impl", "__doc__", "__module__", "__dict__", "__weakref__"})


class Node(NamedTuple):
    """A value that is taken apart."""

    kind: str
    """Its type, and what else must be equal besides data and children; shown."""
    detail: bytes = b""
    """The same, not shown."""
    data: Callable[[], Iterable[Any]] | None = None
    """Buffers of bytes, for a leaf."""
    size: int = 0
    """Their number of bytes."""
    children: Iterable[tuple[str, Any]] = ()
    """How each is reached from the value, and it."""
    text: Callable[[], str] | None = None
    """The value as text, for a leaf."""
    array: Callable[[], Any] | None = None
    """The value as a NumPy array, for a leaf."""
    is_unordered: bool = False


class CannotCompareError(Exception):
    """This value has no faithful form; the message says what it is."""


def digest_of(parts: Iterable[Any], size: int) -> bytes:
    """Return the digest of buffers, in `size` bytes."""
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(part)
    return digest.digest()


def shape_of(value: Any) -> str:
    """Format the shape of an array, a tensor or a table."""
    if getattr(value, "is_nested", False):
        return f"{value.size(0)} × ragged"
    return " × ".join(map(str, value.shape)) or "scalar"


def describe(value: Any) -> Node:
    """Take a value apart.

    Raises:
        Exception: `CannotCompareError`, or whatever an odd object raises.
    """
    kind: Any = type(value)
    return _rule(kind)(value)


@functools.lru_cache(maxsize=4096)
def _rule(kind: Any) -> Callable[[Any], Node]:
    if kind in SCALARS:
        return _scalar
    for base in kind.__mro__:
        if rule := _RULES.get(f"{str(base.__module__).partition('.')[0]}.{base.__name__}"):
            return rule
    if str(kind.__module__).startswith("axon_nb."):
        return _of_process
    return _other


def _name(kind: Any) -> str:
    module, name = getattr(kind, "__module__", ""), getattr(kind, "__qualname__", None) or repr(kind)
    return str(name) if module in ("builtins", "__main__", None, "") else f"{module}.{name}"


def _scalar_bytes(value: Any) -> bytes:
    if type(value) is float:
        return struct.pack("<d", value)
    if type(value) is complex:
        return struct.pack("<dd", value.real, value.imag)
    return value if type(value) is bytes else repr(value).encode()


def _scalar(value: Any) -> Node:
    def data() -> list[bytes]:
        return [_scalar_bytes(value)]

    return Node(
        type(value).__name__, data=data, size=len(value) if type(value) is bytes else 8, text=lambda: repr(value)
    )


def _is_batch(value: Any) -> bool:
    return len(value) > _BATCH and SCALARS.issuperset(map(type, value))


def _items(value: Any) -> Node:
    kind = f"{type(value).__name__} of {len(value)}"
    if not _is_batch(value):
        return Node(kind, children=((f"[{index}]", item) for index, item in enumerate(value)))
    kinds = set(map(type, value))

    def data() -> list[bytes]:
        if kinds <= {float, complex}:
            return [b"".join(map(_scalar_bytes, value))]
        return [repr(list(value)).encode()]

    def array() -> Any:
        import numpy as np

        if kinds in ({int}, {float}, {bool}, {complex}):
            numbers = np.array(value)
            if not numbers.dtype.hasobject:
                return numbers
        texts = [repr(item) for item in value]
        return np.array(
            [text if len(text) <= 80 else f"{text[:60]}…{digest_of([text.encode()], 8).hex()}" for text in texts]
        )

    return Node(kind, data=data, size=8 * len(value), array=array)


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return type(key) in SCALARS or isinstance(key, (Enum, torch.dtype, torch.device))


def _key(key: Any) -> str:
    if type(key) is str and key.isprintable() and not set(key) & {'"', "\\"}:
        return f'["{key}"]'
    return f"[{key!r}]"


def _mapping(value: Any) -> Node:
    kind = f"{type(value).__name__} of {len(value)}"
    keys = list(value)
    if len(keys) > 1000 and _is_batch(keys) and _is_batch(items := list(value.values())):
        return Node(kind, children=((".keys()", keys), (".values()", items)))
    plain = list(map(_is_key, keys))

    def children() -> Iterator[tuple[str, Any]]:
        for index, (key, item) in enumerate(value.items()):
            if not plain[index]:
                yield f".keys()[{index}]", key
            yield _key(key) if plain[index] else f".values()[{index}]", item

    # Ranks that iterate in another order make other calls.
    known = [_key(key) for key, is_plain in zip(keys, plain, strict=True) if is_plain]
    detail = "\n".join(known).encode("utf-8", "surrogatepass")
    return Node(kind, detail, children=children(), text=lambda: f"{kind}: {', '.join(known)}")


def _set(value: Any) -> Node:
    kind = f"{type(value).__name__} of {len(value)}"
    return Node(
        kind,
        children=(("", item) for item in value),
        text=lambda: f"{kind}: {', '.join(sorted(map(repr, value)))}",
        is_unordered=True,
    )


def _code(code: types.CodeType) -> Node:
    names = (code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_names, code.co_varnames, code.co_freevars)
    return Node(
        f"code of {code.co_name}", repr(names).encode() + code.co_code, children=((".co_consts", code.co_consts),)
    )


def _function(value: Any) -> Node:
    if value.__module__ not in ("__main__", None) and "<locals>" not in value.__qualname__:
        return Node(f"function {_name(value)}")
    cells = [cell.cell_contents for cell in value.__closure__ or () if _is_bound(cell)]
    parts = {"__code__": value.__code__, "__defaults__": value.__defaults__, "__kwdefaults__": value.__kwdefaults__}
    parts |= {"__closure__": cells, "__dict__": vars(value)}
    return Node(f"function {_name(value)}", children=((f".{name}", part) for name, part in parts.items() if part))


def _is_bound(cell: Any) -> bool:
    try:
        return bool(cell.cell_contents is cell.cell_contents)
    except ValueError:
        return False


def _class(value: Any) -> Node:
    kind = f"class {_name(value)}({', '.join(map(_name, value.__bases__))})"
    if value.__module__ != "__main__":
        return Node(kind)

    def children() -> Iterator[tuple[str, Any]]:
        for name in sorted(vars(value)):
            item = getattr(vars(value)[name], "__func__", vars(value)[name])
            if name not in _NOT_OF_CLASSES and (not name.startswith("__") or isinstance(item, types.FunctionType)):
                yield f".{name}", item

    return Node(kind, children=children())


def _by_name(value: Any) -> Node:
    return Node(f"{type(value).__name__} {_name(value)}")


def _by_repr(value: Any) -> Node:
    return Node(f"{_name(type(value))} {value!r}")


def _of_process(value: Any) -> Node:
    raise CannotCompareError(f"a {type(value).__name__}, which belongs to its process")


def _enum(value: Any) -> Node:
    return Node(f"{_name(type(value))}.{value.name}", children=((".value", value.value),))


def _partial(value: Any) -> Node:
    parts = {"func": value.func, "args": value.args, "keywords": value.keywords, "__dict__": vars(value)}
    return Node(_name(type(value)), children=((f".{name}", part) for name, part in parts.items()))


def _property(value: Any) -> Node:
    return Node("property", children=((f".{name}", getattr(value, name)) for name in ("fget", "fset", "fdel")))


def _view(value: memoryview) -> Node:
    return Node(f"memoryview {value.format} {value.shape}", data=lambda: [value.tobytes()], size=value.nbytes)


def _other(value: Any) -> Node:
    if array_device(value) is not None:
        return _wrapped(value, as_numpy(value))
    return _reduced(value)


def _wrapped(value: Any, inner: Any, *more: tuple[str, Any]) -> Node:
    node = describe(inner)
    kind = f"{node.kind} {_name(type(value))}"
    return node._replace(kind=kind, children=(*node.children, *more)) if more else node._replace(kind=kind)


def _reduced(value: Any) -> Node:
    """Take an object apart as pickle does: what it does not pickle cannot be compared."""
    kind = type(value)
    reduce = copyreg.dispatch_table.get(kind)
    reduced: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return Node(f"{_name(kind)} {reduced}")
    function, arguments, state, items, pairs = (list(reduced) + [None] * 3)[:5]
    children = [(f".args[{index}]", item) for index, item in enumerate(arguments) if item is not kind]
    if kind.__module__ == "__main__":
        children.append((".__class__", kind))
    if type(state) is tuple and len(state) == 2 and isinstance(state[1], dict):
        state = {**(state[0] or {}), **state[1]}
    if type(state) is dict and all(type(key) is str for key in state):
        children += [(f".{key}", state[key]) for key in sorted(state)]
    elif state is not None:
        children.append((".__getstate__()", state))
    if items is not None:
        children.append(("", list(items)))
    if pairs is not None:
        children.append(("", dict(pairs)))
    return Node(f"{_name(kind)} made by {_name(function)}", children=children, text=lambda: _name(kind))


# ---- arrays


def _array(value: Any) -> Node:
    import numpy as np

    plain = value if type(value) is np.ndarray else value.view(np.ndarray)
    if type(value) is not np.ndarray:
        attributes = [] if isinstance(value, np.memmap) else [(f".{key}", item) for key, item in vars(value).items()]
        return _wrapped(value, plain, *attributes)
    kind = f"{shape_of(value)} {value.dtype}"
    if value.dtype.names:  # between fields there may be bytes that mean nothing
        return Node(kind, children=((_key(name), value[name]) for name in value.dtype.names))
    if value.dtype.hasobject:
        return Node(kind, children=(("" if value.ndim == 1 else ".flat", value.ravel().tolist()),))

    def data() -> list[Any]:
        flat = np.ascontiguousarray(value).reshape(-1)
        if value.dtype.char in "gG" and np.finfo(value.dtype).nmant == 63:  # 80 bits in 128
            return [np.ascontiguousarray(flat.view(np.uint8).reshape(-1, 16)[:, :10])]
        return [flat.view(np.uint8)] if flat.nbytes else []

    return Node(kind, data=data, size=value.nbytes, array=lambda: value)


def _masked_array(value: Any) -> Node:
    import numpy as np

    data, mask = np.array(value.data, subok=False), np.ma.getmaskarray(value)
    if data.dtype.names is None:
        data[mask] = data.dtype.type() if not data.dtype.hasobject else None  # what is masked has no value
    return Node(
        f"{shape_of(value)} {value.dtype} {_name(type(value))}",
        children=(("", data), (".mask", mask), (".fill_value", value.fill_value), (".hardmask", bool(value.hardmask))),
    )


def _number(value: Any) -> Node:
    import numpy as np

    node = _wrapped(value, np.asarray(value))
    return node._replace(array=None, text=lambda: repr(value))


def _tensor(value: Any) -> Node:
    if (found := placed(value)) is not None:
        if not found.is_replicated:
            raise CannotCompareError("sharded: each rank holds its own part")
        if is_dtensor(value):
            return _wrapped(value, found.local.detach())
    layout = str(value.layout).removeprefix("torch.")
    kind = f"{shape_of(value)} {str(value.dtype).removeprefix('torch.')}"
    kind += f" {layout}" if layout != "strided" else ""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    kind += f" {_name(type(value))}" if type(value) is not torch.Tensor and not value.is_nested else ""
    kind += " requires_grad" if value.requires_grad else ""
    kind += " meta" if value.is_meta else "" if value.device.type == "cpu" else f" {value.device.type}"
    attributes = [(f".{name}", item) for name, item in vars(value).items() if not is_plain or not name.startswith("_")]
    value = value.detach()
    if value.is_meta or type(value).__name__ == "FakeTensor":
        return Node(kind)
    if value.is_nested:
        return Node(kind, children=((f".unbind()[{index}]", part) for index, part in enumerate(value.unbind())))
    if hasattr(type(value), "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return Node(kind, children=[*((f".{name}", getattr(value, name)) for name in names), (".context", context)])
    value = value if type(value) is torch.Tensor else value.as_subclass(torch.Tensor)
    return _memory(value, kind, attributes)


def _memory(value: torch.Tensor, kind: str, attributes: list[tuple[str, Any]]) -> Node:
    layout = str(value.layout).removeprefix("torch.")
    if layout in ("sparse_coo", *_COMPRESSED):
        value = value.coalesce() if layout == "sparse_coo" else value
        names = (*_COMPRESSED.get(layout, ("indices",)), "values")
        return Node(kind, children=[*((f".{name}()", getattr(value, name)()) for name in names), *attributes])
    if value.is_quantized:
        scheme = str(value.qscheme())
        names = ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")
        names = names if "channel" in scheme else ("q_scale", "q_zero_point")
        names = (*names, "int_repr")
        return Node(f"{kind} {scheme}", children=[(f".{name}()", getattr(value, name)()) for name in names])
    if layout != "strided":
        value = value.to_dense()
    size = value.numel() * value.element_size()

    def array() -> Any:
        dense = value.cpu().resolve_conj().resolve_neg()
        # NumPy has neither bfloat16 nor float8.
        return (dense.float() if dense.dtype.itemsize < 4 and dense.is_floating_point() else dense).numpy()

    return Node(kind, data=lambda: [tensor_bytes(value)], size=size, array=array, children=attributes)


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes of a dense tensor, in the order of its elements."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().data if dense.numel() else b""


def _generator(value: Any) -> Node:
    return Node("Generator", children=((".get_state()", value.get_state()), (".device.type", value.device.type)))


def _mesh(value: Any) -> Node:
    return Node(f"DeviceMesh {value.device_type} {value.mesh_dim_names} {value.mesh.tolist()}")


def _storage(value: Any) -> Node:
    memory = value if type(value) is torch.UntypedStorage else value.untyped()
    kind = f"{_name(type(value))} {getattr(value, 'dtype', '')} of {memory.nbytes()} bytes"
    plain = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return Node(kind, data=lambda: [tensor_bytes(plain.set_(memory))], size=memory.nbytes())


# ---- modules and what trains them


def _module(value: Any) -> Node:
    if is_sharded(value) and not hasattr(value, "unshard"):  # FSDP's flat parameters, whose attributes are its own
        raise CannotCompareError("sharded: each rank holds its own part")
    known = vars(torch.nn.Module()).keys() - {"training"}
    names = sorted(name for name in vars(value) if name not in known and not name.startswith("__"))
    return Node(
        _name(type(value)),
        children=[
            *_module_parts(value),
            *_hooks(value),
            *((f".{name}", vars(value)[name]) for name in names),
            *([(".__class__", type(value))] if type(value).__module__ == "__main__" else []),
        ],
    )


def _module_parts(value: Any) -> Iterator[tuple[str, Any]]:
    named = (value.named_parameters(recurse=False), value.named_buffers(recurse=False), value.named_children())
    return ((f".{name}", item) for part in named for name, item in part)


def _hooks(value: Any) -> Iterator[tuple[str, Any]]:
    """The code of hooks, which change what a module computes; what they hold is of one rank, such as activations."""
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        for hook in vars(value).get(name, {}).values():
            if not str(hook.__module__).startswith("axon_nb."):
                yield f".{name}", getattr(hook, "__code__", None) or _name(type(hook))


def _wrapper(value: Any) -> Node:
    return Node(_name(type(value)), children=_module_parts(value))


def _script_module(value: Any) -> Node:
    return Node(_name(type(value)), children=[*_module_parts(value), (".graph", str(value.graph))])


def _by_state_dict(value: Any) -> Node:
    return Node(_name(type(value)), children=((".state_dict()", value.state_dict()),))


def _scheduler(value: Any) -> Node:
    state = {name: item for name, item in vars(value).items() if name != "optimizer"}
    return Node(_name(type(value)), children=[(f".{name}", state[name]) for name in sorted(state)])


# ---- tables, and arrays of other libraries


def _frame(value: Any) -> Node:
    columns = ((_key(name) if _is_key(name) else f"[{name!r}]", index) for index, name in enumerate(value.columns))
    return Node(
        f"{shape_of(value)} {_name(type(value))}",
        children=[
            *((label, value.iloc[:, index].array) for label, index in columns),
            (".index", value.index),
            (".columns", value.columns),
            *([(".attrs", value.attrs)] if value.attrs else []),
        ],
    )


def _series(value: Any) -> Node:
    kind = f"{shape_of(value)} {value.dtype} {_name(type(value))}"
    more = [(".attrs", value.attrs)] if value.attrs else []
    return Node(kind, children=[("", value.array), (".name", value.name), (".index", value.index), *more])


def _index(value: Any) -> Node:
    frequency = getattr(value, "freqstr", None) or ""
    kind = f"{shape_of(value)} {value.dtype} {_name(type(value))} {frequency}".rstrip()
    levels = [(f".get_level_values({level})", value.get_level_values(level)) for level in range(value.nlevels)]
    return Node(kind, children=[*(levels if value.nlevels > 1 else [("", value.array)]), (".names", list(value.names))])


def _extension_array(value: Any) -> Node:
    kind = f"{shape_of(value)} {value.dtype}"
    names: tuple[str, ...] = ()
    if hasattr(value, "categories"):
        names = ("ordered", "categories", "codes")
    elif hasattr(value, "closed"):
        names = ("closed", "left", "right")
    elif hasattr(value, "sp_values"):
        names = ("fill_value", "sp_values", "sp_index")
    if names:
        return Node(kind, children=((f".{name}", getattr(value, name)) for name in names))
    numbers = getattr(value, "asi8", None)
    if numbers is None and type(value).__name__ == "NumpyExtensionArray":
        numbers = value.to_numpy()
    if numbers is not None:
        return Node(kind, children=(("", numbers),))
    missing = value.isna()
    items = [None if is_missing else item for item, is_missing in zip(value.tolist(), missing, strict=True)]
    return Node(kind, children=(("", items),))


def _polars_frame(value: Any) -> Node:
    return Node(f"{shape_of(value)} {_name(type(value))}", children=[(_key(part.name), part) for part in value])


def _polars_series(value: Any) -> Node:
    items = value.to_list() if value.null_count() or not value.dtype.is_numeric() else value.to_numpy()
    return Node(f"{len(value)} {value.dtype} {_name(type(value))}", children=((".name", value.name), ("", items)))


def _arrow_table(value: Any) -> Node:
    columns = [(_key(name), value.column(index)) for index, name in enumerate(value.schema.names)]
    return Node(f"{shape_of(value)} {_name(type(value))}", str(value.schema).encode(), children=columns)


def _arrow_array(value: Any) -> Node:
    return Node(f"{len(value)} {value.type} {_name(type(value))}", children=(("", value.to_pylist()),))


def _sparse_matrix(value: Any) -> Node:
    parts = value.tocoo(copy=True)
    parts.sum_duplicates()  # it sorts, too
    children = [*((f".coords[{axis}]", index) for axis, index in enumerate(parts.coords)), (".data", parts.data)]
    return Node(f"{shape_of(value)} {value.dtype} {_name(type(value))}", children=children)


def _tensor_dict(value: Any) -> Node:
    kind = f"{_name(type(value))} of batch size {tuple(value.batch_size)}, names {value.names}"
    return Node(kind, children=[(_key(name), value.get(name)) for name in sorted(value.keys(), key=str)])


_RULES: dict[str, Callable[[Any], Node]] = {
    "builtins.list": lambda value: _items(value) if type(value) is list else _reduced(value),
    "builtins.tuple": lambda value: _items(value) if type(value) is tuple else _reduced(value),
    "builtins.dict": lambda value: _mapping(value) if type(value) is dict else _reduced(value),
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.mappingproxy": lambda value: _mapping(dict(value)),
    "builtins.dict_keys": lambda value: _items(list(value)),
    "builtins.dict_values": lambda value: _items(list(value)),
    "builtins.function": _function,
    "builtins.code": _code,
    "builtins.type": _class,
    "builtins.module": _by_name,
    "builtins.property": _property,
    "builtins.staticmethod": lambda value: _function(value.__func__),
    "builtins.classmethod": lambda value: _function(value.__func__),
    "builtins.member_descriptor": _by_name,
    "builtins.getset_descriptor": _by_name,
    "builtins.memoryview": _view,
    "enum.Enum": _enum,
    "functools.partial": _partial,
    "functools._lru_cache_wrapper": lambda value: _function(value.__wrapped__),
    "PIL.Image": _reduced,
    "numpy.ndarray": _array,
    "numpy.MaskedArray": _masked_array,
    "numpy.generic": _number,
    "numpy.Generator": lambda value: Node("Generator", children=((".bit_generator", value.bit_generator),)),
    "numpy.BitGenerator": lambda value: Node(_name(type(value)), children=((".state", value.state),)),
    "numpy.RandomState": lambda value: Node("RandomState", children=((".get_state()", value.get_state()),)),
    "torch.Tensor": _tensor,
    "torch.Generator": _generator,
    "torch.dtype": _by_repr,
    "torch.device": _by_repr,
    "torch.layout": _by_repr,
    "torch.memory_format": _by_repr,
    "torch.Size": lambda value: _items(tuple(value))._replace(kind=repr(value)),
    "torch.UntypedStorage": _storage,
    "torch.TypedStorage": _storage,
    "torch.ProcessGroup": _of_process,
    "torch.DeviceMesh": _mesh,
    "torch.Module": _module,
    "torch.DistributedDataParallel": _wrapper,
    "torch.OptimizedModule": _wrapper,
    "torch.ScriptModule": _script_module,
    "torch.Optimizer": _by_state_dict,
    "torch.GradScaler": _by_state_dict,
    "torch.LRScheduler": _scheduler,
    "pandas.DataFrame": _frame,
    "pandas.Series": _series,
    "pandas.Index": _index,
    "pandas.ExtensionArray": _extension_array,
    "pandas.IntIndex": lambda value: Node(f"IntIndex of {value.length}", children=((".indices", value.indices),)),
    "polars.DataFrame": _polars_frame,
    "polars.Series": _polars_series,
    "pyarrow.Table": _arrow_table,
    "pyarrow.RecordBatch": _arrow_table,
    "pyarrow.Array": _arrow_array,
    "pyarrow.ChunkedArray": _arrow_array,
    "scipy.sparray": _sparse_matrix,
    "scipy.spmatrix": _sparse_matrix,
    "tensordict.TensorDictBase": _tensor_dict,
}
"""How objects are taken apart, by the package and the name of their class or of the nearest base that is listed."""
