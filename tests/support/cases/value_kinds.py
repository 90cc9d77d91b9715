"""Kinds of values that cells hold: each as a function that makes equal values for equal numbers, and others for others.

`differs` compares two of them to the last bit and attribute. Kinds of packages that are not installed are left out.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import importlib
import importlib.util
import pathlib
import random
import re
import struct
import threading
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

sparse: Any = importlib.import_module("scipy.sparse")  # it has no types


class Angle(torch.Tensor):
    """A tensor with an attribute."""

    unit: str

    @staticmethod
    def of(values: Any, unit: str) -> Angle:
        """Make one of plain values."""
        angle: Any = torch.as_tensor(values).as_subclass(Angle)
        angle.unit = unit
        return angle  # type: ignore[no-any-return]


class Unit(np.ndarray[Any, Any]):
    """An array with an attribute."""

    def __array_finalize__(self, other: Any) -> None:
        self.unit = getattr(other, "unit", "")


@dataclasses.dataclass
class Config:
    """A data class."""

    value: Any
    step: int = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    """A data class without a dictionary."""

    value: Any


class Plain:
    """An object whose repr has its address."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Color(enum.Enum):
    """An enum."""

    RED = 0
    BLUE = 1


Point = collections.namedtuple("Point", "x y")  # what users write


def _hidden(x: int) -> torch.Tensor:
    """5,000 numbers, of which one is another: their repr does not show it."""
    tensor = torch.zeros(5000)
    tensor[2500] = x
    return tensor


def _unit(x: int) -> Unit:
    made = np.arange(4.0).view(Unit)
    made.unit = f"m{x}"
    return made


def _network(x: int, p: float = 0.1) -> nn.Sequential:
    network = nn.Sequential(nn.Linear(3, 3), nn.Dropout(p))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.5)
        network.get_parameter("0.bias")[1] = x
    return network


def _optimizer(x: int) -> torch.optim.Optimizer:
    network = _network(0)
    optimizer = torch.optim.Adam(network.parameters(), 0.1 + x)
    network.eval()(torch.ones(3)).sum().backward()
    optimizer.step()
    return optimizer


def _scheduler(x: int) -> Any:
    return torch.optim.lr_scheduler.StepLR(_optimizer(0), 1 + x)


def _scaler(x: int) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0 + x)


def _torch_generator(x: int) -> torch.Generator:
    return torch.Generator().manual_seed(x)


def _generator(x: int) -> np.random.Generator:
    generator = np.random.default_rng(5)
    generator.random(x)
    return generator


def _random_state(x: int) -> np.random.RandomState:
    state = np.random.RandomState(5)
    state.random(x)
    return state


def _python_random(x: int) -> random.Random:
    state = random.Random(5)
    for _ in range(x):
        state.random()
    return state


def _scaled(x: int) -> Callable[[int], int]:
    return lambda number: number * x


def _dataset(x: int) -> torch.utils.data.Dataset[Any]:
    return torch.utils.data.TensorDataset(_hidden(x))


def _tied(x: int) -> dict[str, torch.Tensor]:
    tensor = torch.full((3,), float(x))
    return {"encoder": tensor, "decoder": tensor}


def _cycle(x: int) -> list[Any]:
    items: list[Any] = [x]
    items.append(items)
    return items


def _buffer(x: int) -> Any:
    return nn.Buffer(torch.full((4,), float(x)))


def _marked(x: int) -> nn.Parameter:
    parameter: Any = nn.Parameter(torch.zeros(4))
    parameter.is_split = bool(x)
    return parameter  # type: ignore[no-any-return]


def _attributes(x: int) -> pd.DataFrame:
    frame = pd.DataFrame({"a": [1, 2]})
    frame.attrs["source"] = x
    return frame


def _hard_mask(x: int) -> Any:
    return np.ma.masked_array(
        [1.0, 2.0, 3.0, 4.0 + x], mask=[False, True, False, False], hard_mask=True, fill_value=-1.0
    )


def _quantized(x: int, scale: float = 0.5) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(4.0) + x, scale, 0, torch.quint8)


def _per_channel(x: int) -> torch.Tensor:
    ones = torch.ones(2, 2) + x
    return torch.quantize_per_channel(ones, torch.tensor([0.5, 0.5]), torch.tensor([0, 0]), 0, torch.quint8)


def _ragged(x: int, layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0) + x], layout=layout)


def _chars(x: int) -> Any:
    return np.array(
        [("a", 1, 2.5), ("b", x, 3.5)] * 2, dtype=np.dtype([("t", "U1"), ("n", "i1"), ("v", "f8")], align=True)
    )


KINDS: dict[str, Callable[[int], Any]] = {
    # Python
    "none": lambda x: None if x else 0,
    "whole number": lambda x: 2**70 + x,
    "nan": lambda x: float("nan") if x else 1.0,
    "zeros": lambda x: -0.0 if x else 0.0,
    "complex": lambda x: complex(0, x),
    "text": lambda x: f"rank {x}",
    "bytes": lambda x: bytes([x, 0]),
    "bytearray": lambda x: bytearray([x, 0]),
    "memoryview": lambda x: memoryview(bytearray([x, 0])),
    "list": lambda x: [1, [2, x], "a", None],
    "long list": lambda x: [0] * 3000 + [x] + [1] * 10,
    "mixed list": lambda x: ["a", 1.5, None] * 10 + [x],
    "tuple": lambda x: (1, x),
    "named tuple": lambda x: Point(1, x),
    "size": lambda x: torch.Size([1, x]),
    "range": lambda x: range(x, 9),
    "slice": slice,
    "set": lambda x: {"a", "b", "c", x},
    "frozenset": lambda x: frozenset({(1, x), "a"}),
    "dict": lambda x: {"w": _hidden(x), 3: "b"},
    "order of keys": lambda x: {"a": 1, "b": 2} if x else {"b": 2, "a": 1},
    "large dict": lambda x: {f"token {n}": n + (x if n == 700 else 0) for n in range(2000)},
    "ordered dict": lambda x: collections.OrderedDict(a=x),
    "default dict": lambda x: collections.defaultdict(list, a=[x]),
    "counter": lambda x: collections.Counter({"a": x + 1}),
    "deque": lambda x: collections.deque([1, x], maxlen=5),
    "array": lambda x: array.array("d", [1, x]),
    "data class": lambda x: Config([_hidden(x)]),
    "slots": lambda x: Slotted(_hidden(x)),
    "object": lambda x: Plain({"lr": 0.1, "data": _hidden(x)}),
    "namespace": lambda x: types.SimpleNamespace(a=x),
    "enum": lambda x: list(Color)[x],
    "function": _scaled,
    "partial": lambda x: functools.partial(max, x),
    "date": lambda x: dt.datetime(2024, 1, 1 + x, tzinfo=dt.UTC),
    "decimal": lambda x: decimal.Decimal(x) / 7,
    "path": lambda x: pathlib.PurePosixPath(f"/data/{x}"),
    "pattern": lambda x: re.compile(f"a{x}"),
    "uuid": lambda x: uuid.UUID(int=x),
    "random": _python_random,
    "cycle": _cycle,
    # torch
    "tensor": lambda x: torch.arange(4) + x,
    "hidden": _hidden,
    "scalar": lambda x: torch.tensor(3.5 + x),
    "empty": lambda x: torch.empty(0, 3 + x),
    "bfloat16": lambda x: (torch.arange(4.0) + x).bfloat16(),
    "float8": lambda x: (torch.arange(4.0) + x).to(torch.float8_e4m3fn),
    "bool": lambda x: torch.tensor([True, bool(x)] * 2),
    "turned": lambda x: (torch.arange(8.0).reshape(2, 4) + x).T,
    "expanded": lambda x: (torch.ones(1) + x).expand(4, 3),
    "view": lambda x: torch.arange(1000.0)[10 + x : 14 + x],
    "conj": lambda x: torch.tensor([1 + 2j, 3 - 1j] * 2).add(x).conj(),
    "neg": lambda x: torch.tensor([1 + 2j, 3 - 1j + x * 1j] * 2).conj().imag,
    "meta": lambda x: torch.empty(4, 2 + x, device="meta"),
    "parameter": lambda x: nn.Parameter(torch.arange(4.0) + x),
    "frozen parameter": lambda x: nn.Parameter(torch.arange(4.0) + x, requires_grad=False),
    "marked parameter": _marked,
    "leaf": lambda x: (torch.arange(4.0) + x).requires_grad_(),
    "buffer": _buffer,
    "subclass": lambda x: Angle.of([1.0, 2.0, 3.0, 4.0], f"unit {x}"),
    "values of a subclass": lambda x: Angle.of([1.0, 2.0, 3.0, 4.0 + x], "deg"),
    "sparse": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), [3.0, 4.0 + x], (4, 3)),
    "csr": lambda x: (torch.eye(4) * (1 + x)).to_sparse_csr(),
    "bsr": lambda x: (torch.eye(4) * (1 + x)).to_sparse_bsr((2, 2)),
    "quantized": _quantized,
    "scale": lambda x: _quantized(0, 0.5 + x),
    "per channel": _per_channel,
    "jagged": lambda x: _ragged(x, torch.jagged),
    "nested": lambda x: _ragged(x, torch.strided),
    "tied": _tied,
    "dtype": lambda x: [torch.float16, torch.bfloat16][x],
    "device": lambda x: [torch.device("cpu"), torch.device("cuda", 1)][x],
    "generator": _torch_generator,
    "module": _network,
    "dropout": lambda x: _network(0, 0.1 + 0.1 * x),
    "mode": lambda x: _network(0).train(bool(x)),
    "state dict": lambda x: _network(x).state_dict(),
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "scaler": _scaler,
    "dataset": _dataset,
    "loader": lambda x: torch.utils.data.DataLoader(_dataset(x), batch_size=2, shuffle=True),
    # NumPy and SciPy
    "numpy": lambda x: np.arange(4) + x,
    "hidden numpy": lambda x: _hidden(x).numpy(),
    "numpy scalar": np.float32,
    "no dimension": np.array,
    "fortran": lambda x: np.asfortranarray(np.arange(8).reshape(4, 2) + x),
    "long double": lambda x: np.array([1, 2, 3, x], dtype=np.longdouble) / 3,
    "datetimes": lambda x: np.array(["2024-01-01", "2024-01-02", "2024-01-03", f"2024-01-1{x}"], dtype="datetime64[D]"),
    "texts": lambda x: np.array(["a", "bb", "ccc", f"d{x}"]),
    "string dtype": lambda x: np.array(["a", "b" * 100, "c", f"d{x}"], dtype=np.dtypes.StringDType()),
    "objects": lambda x: np.array([{"x": x}, None, "s", 2], dtype=object),
    "structured": _chars,
    "records": lambda x: np.rec.array([(1, "a"), (x, "b")] * 2, dtype=[("n", int), ("t", "U1")]),
    "masked": lambda x: np.ma.masked_array([1.0, 2.0, 3.0, 4.0], mask=[False, True, bool(x), False]),
    "values of masked": _hard_mask,
    "matrix": lambda x: np.matrix([[1, x], [2, 3]] * 2),
    "subclass of numpy": _unit,
    "numpy generator": _generator,
    "numpy state": _random_state,
    "scipy": lambda x: sparse.csr_matrix(np.eye(3) * (1 + x)),
    "sparse array": lambda x: sparse.coo_array(np.eye(3) * (1 + x)),
    # pandas
    "series": lambda x: pd.Series([1.0, 2.0, 3.0, 4.0 + x], name="v"),
    "hidden series": lambda x: pd.Series(_hidden(x).numpy()),
    "strings": lambda x: pd.Series(["a", None, "c", f"d{x}"]),
    "categories": lambda x: pd.Series(["a", "b"] * 2, dtype=pd.CategoricalDtype(["a", "b", *("z" * x)])),
    "categorical": lambda x: pd.Categorical(["a", "b"] * 2, categories=["a", "b", f"c{x}"], ordered=True),
    "nullable": lambda x: pd.array([1, None, 3, x], dtype="Int64"),
    "interval": lambda x: pd.interval_range(x, x + 4),
    "sparse series": lambda x: pd.Series(pd.arrays.SparseArray([0, 0, 1, x])),
    "times": lambda x: pd.DatetimeIndex([f"2024-01-0{n + x}" for n in (1, 3, 4, 6)], tz="UTC", name="day"),
    "periods": lambda x: pd.period_range(f"2024-0{1 + x}", periods=4, freq="M"),
    "frame": lambda x: pd.DataFrame({"a": [1, 2, 3, 4 + x], "b": list("wxyz")}),
    "columns": lambda x: pd.DataFrame({"a": [1, 2], f"b{x}": [2, 3]}),
    "index": lambda x: pd.DataFrame({"v": [1.0, 2.0, 3.0, 4.0]}, index=[3, 4, 5, 7 + x]),
    "name of index": lambda x: pd.DataFrame({"a": [1, 2]}, index=pd.Index([4, 9], name=f"n{x}")),
    "dtype of column": lambda x: pd.DataFrame({"a": np.array([1, 2], dtype=f"i{4 + 4 * x}")}),
    "multi": lambda x: pd.DataFrame(
        np.arange(8.0).reshape(4, 2), columns=pd.MultiIndex.from_tuples([("a", "x"), ("a", f"y{x}")])
    ),
    "levels": lambda x: pd.Series([1, 2], index=pd.MultiIndex.from_tuples([("a", 1), ("b", x)], names=["k", "n"])),
    "attributes": _attributes,
}

if importlib.util.find_spec("polars"):
    pl: Any = importlib.import_module("polars")

    KINDS["polars"] = lambda x: pl.DataFrame({"a": [1, 2, None], "b": ["x", "y", f"z{x}"]})
    KINDS["polars series"] = lambda x: pl.Series("a", [1.0, x])
if importlib.util.find_spec("pyarrow"):
    pa: Any = importlib.import_module("pyarrow")

    KINDS["arrow"] = lambda x: pa.table({"a": [1, 2], "b": ["x", f"y{x}"]})
if importlib.util.find_spec("xarray"):
    xarray: Any = importlib.import_module("xarray")

    KINDS["xarray"] = lambda x: xarray.DataArray(np.zeros((2, 2)) + x, dims=["a", "b"], coords={"a": [1, 2]})
    KINDS["coordinates"] = lambda x: xarray.Dataset({"v": ("a", [1, 2])}, coords={"a": [1, x]})
if importlib.util.find_spec("tensordict"):
    tensordict: Any = importlib.import_module("tensordict")

    KINDS["tensordict"] = lambda x: tensordict.TensorDict({"a": {"b": _hidden(x).reshape(4, -1)}}, batch_size=[4])
    KINDS["batch size"] = lambda x: tensordict.TensorDict({"a": torch.ones(4, 2)}, batch_size=[4, 2][: 1 + x])

LISTED = frozenset(KINDS) & {
    *(
        "none",
        "whole number",
        "nan",
        "zeros",
        "complex",
        "text",
        "bytes",
        "bytearray",
        "memoryview",
        "named tuple",
        "size",
    ),
    *("range", "slice", "set", "frozenset", "dict", "order of keys", "large dict", "ordered dict", "default dict"),
    *("counter", "deque", "array", "data class", "slots", "object", "namespace", "enum", "function", "partial", "date"),
    *("decimal", "path", "pattern", "uuid", "random", "marked parameter", "subclass", "subclass of numpy"),
    *("sparse", "csr", "bsr", "quantized", "scale", "per channel", "jagged", "nested", "tied", "dtype", "device"),
    *("generator", "module", "dropout", "mode", "state dict", "optimizer", "scheduler", "scaler", "dataset", "loader"),
    *(
        "numpy scalar",
        "numpy generator",
        "numpy state",
        "scipy",
        "sparse array",
        "categorical",
        "categories",
        "columns",
    ),
    *("name of index", "multi", "attributes"),
    *("polars", "polars series", "arrow", "xarray", "coordinates", "tensordict", "batch size"),
}
"""Kinds of which `%gather` lists the values of ranks, rather than joining two that differ."""

NOT_SENT: dict[str, Callable[[int], Any]] = {
    "lock": lambda x: threading.Lock(),
    "running generator": lambda x: (n for n in range(x)),
    "weak reference": lambda x: __import__("weakref").ref(Plain),
    "within": lambda x: {"lock": threading.RLock(), "x": x},
}
"""Kinds that belong to their process: they are neither sent nor compared."""


def nested(seed: int, changed: int = -1) -> tuple[Any, str]:
    """Return a random structure of such values and an expression for its leaf `changed`, which alone is another.

    Args:
        seed: Of the structure.
        changed: The number of the leaf; -1: none.
    """
    draw = random.Random(seed)
    count, found = 0, ""

    def leaf(path: str) -> Any:
        nonlocal count, found
        name = draw.choice(list(KINDS))
        count += 1
        if count - 1 == changed:
            found = path
        return KINDS[name](int(count - 1 == changed))

    def build(path: str, depth: int) -> Any:
        kind = draw.choice(["leaf", "list", "tuple", "dict", "object", "config", "ordered"]) if depth else "list"
        if kind == "leaf" or depth > 3:
            return leaf(path)
        size = draw.randint(2 if not depth else 1, 3)
        if kind in ("list", "tuple"):
            items = [build(f"{path}[{index}]", depth + 1) for index in range(size)]
            return items if kind == "list" else tuple(items)
        if kind in ("dict", "ordered"):
            pairs = {f"k{index}": build(f'{path}["k{index}"]', depth + 1) for index in range(size)}
            return pairs if kind == "dict" else collections.OrderedDict(pairs)
        return (Plain if kind == "object" else Config)(build(f"{path}.value", depth + 1))

    return build("v", 0), found


def halves(value: Any) -> list[Any]:
    """Return the first and the second half of a value along its first dimension, each with its class and attributes."""
    middle = len(value) // 2
    if not isinstance(value, torch.Tensor):
        rows = value.iloc if hasattr(value, "iloc") else value
        return [rows[:middle], rows[middle:]]
    found = []
    for part in (value.detach()[:middle], value.detach()[middle:]):
        half = nn.Parameter(part) if type(value) is nn.Parameter else part.as_subclass(type(value))
        vars(half).update(vars(value))
        found.append(half.requires_grad_(value.requires_grad))
    return found


def differs(a: Any, b: Any, *, place: str = "") -> str:
    """Return where two values differ in type, data or attributes, and how; empty if they are equal."""
    return next(_differences(a, b, place, set()), "")


def _differences(a: Any, b: Any, place: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    if (id(a), id(b)) in seen:
        return
    seen = {*seen, (id(a), id(b))}
    if type(a) is not type(b):
        yield f"{place}: type {type(a).__qualname__} / {type(b).__qualname__}"
        return
    ours, theirs = _parts(a), _parts(b)
    if ours is not None and theirs is not None:
        if list(ours) != list(theirs):
            yield f"{place}: parts {list(ours)} / {list(theirs)}"
        for name in ours.keys() & theirs.keys():
            yield from _differences(ours[name], theirs[name], f"{place}.{name}", seen)
    elif not _equal(a, b):
        yield f"{place}: {str(a)[:60]} / {str(b)[:60]}"


def _parts(value: Any) -> dict[str, Any] | None:
    """What a value consists of, by name; None: it is compared as a whole."""
    for kinds, parts in _TAKEN_APART:
        if isinstance(value, kinds):
            return parts(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _masked_parts(value: Any) -> dict[str, Any]:
    data, mask = np.array(value.data, subok=False), np.ma.getmaskarray(value)
    data[mask] = 0
    return {"data": data, "mask": mask, "fill": value.fill_value.tobytes(), "hard": bool(value.hardmask)}


def _array_parts(value: Any) -> dict[str, Any]:
    facts = {"dtype": str(value.dtype), "shape": value.shape, "attributes": dict(getattr(value, "__dict__", {}))}
    if value.dtype.names:
        return facts | {name: np.asarray(value)[name] for name in value.dtype.names}
    return facts | {"data": value.tolist() if value.dtype.char in "OTgG" else value.tobytes()}


def _module_parts(value: Any) -> dict[str, Any]:
    state = {name: (item.requires_grad, item.detach()) for name, item in value.state_dict(keep_vars=True).items()}
    return {"state": state, "modes": [(str(module), module.training) for module in value.modules()]}


def _function_parts(value: Any) -> dict[str, Any]:
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return {"code": value.__code__.co_code, "cells": cells, "defaults": value.__defaults__}


def _tensor_parts(value: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"dtype": value.dtype, "layout": value.layout, "requires_grad": value.requires_grad}
    facts |= {} if value.is_nested else {"shape": tuple(value.shape), "attributes": dict(vars(value))}
    value = value.detach()
    if value.is_meta:
        return facts
    if value.is_nested:
        return facts | {"parts": list(value.unbind())}
    if value.layout is torch.sparse_coo:
        return facts | {"indices": value.coalesce().indices(), "values": value.coalesce().values()}
    if value.layout is not torch.strided:
        return facts | {"rows": value.crow_indices(), "columns": value.col_indices(), "values": value.values()}
    if value.is_quantized:
        return facts | {"data": value.int_repr(), "scheme": value.qscheme(), "numbers": value.dequantize()}
    dense = value.as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    return facts | {"data": dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""}


def _equal(a: Any, b: Any) -> bool:
    for kinds, equal in _COMPARED:
        if isinstance(a, kinds):
            return bool(equal(a, b))
    if type(a).__module__.startswith(("polars", "pyarrow", "xarray")):
        return bool(getattr(a, "identical" if hasattr(a, "identical") else "equals")(b))
    if type(a).__module__.startswith("tensordict"):
        keys = [sorted(map(str, value.keys(include_nested=True))) for value in (a, b)]
        return keys[0] == keys[1] and a.batch_size == b.batch_size and bool((a == b).all())
    return bool(a == b)


def _passes(check: Callable[..., None], **options: Any) -> Callable[[Any, Any], bool]:
    def equal(a: Any, b: Any) -> bool:
        try:
            check(a, b, **options)
        except AssertionError:
            return False
        return bool(getattr(a, "attrs", None) == getattr(b, "attrs", None))

    return equal


_TAKEN_APART: list[tuple[Any, Callable[[Any], dict[str, Any]]]] = [
    (torch.Tensor, _tensor_parts),
    (np.ma.MaskedArray, _masked_parts),
    (np.ndarray, _array_parts),
    ((list, tuple, collections.deque), lambda value: {f"[{index}]": item for index, item in enumerate(value)}),
    (dict, lambda value: {repr(key): item for key, item in value.items()}),
    (nn.Module, _module_parts),
    (
        (torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler),
        lambda value: {"state": value.state_dict()},
    ),
    (torch.utils.data.DataLoader, lambda value: {"dataset": value.dataset, "batch_size": value.batch_size}),
    (functools.partial, lambda value: {"function": value.func, "arguments": value.args, "keywords": value.keywords}),
    (types.FunctionType, _function_parts),
    ((Plain, types.SimpleNamespace, torch.utils.data.Dataset), lambda value: dict(vars(value))),
]
_TABLE = {"check_exact": True, "check_freq": True, "check_index_type": "equiv"}
_COMPARED: list[tuple[Any, Callable[[Any, Any], bool]]] = [
    (float, lambda a, b: struct.pack("d", a) == struct.pack("d", b)),
    (pd.DataFrame, _passes(pd.testing.assert_frame_equal, **_TABLE)),
    (pd.Series, _passes(pd.testing.assert_series_equal, **_TABLE)),
    (pd.Index, _passes(pd.testing.assert_index_equal, exact=True)),
    (pd.api.extensions.ExtensionArray, _passes(pd.testing.assert_extension_array_equal, check_exact=True)),
    (
        (sparse.sparray, sparse.spmatrix),
        lambda a, b: a.shape == b.shape and a.dtype == b.dtype and (a != b).nnz == 0,
    ),
    (torch.Generator, lambda a, b: torch.equal(a.get_state(), b.get_state())),
    (np.random.Generator, lambda a, b: a.bit_generator.state == b.bit_generator.state),
    (np.random.RandomState, lambda a, b: str(a.get_state()) == str(b.get_state())),
    (random.Random, lambda a, b: a.getstate() == b.getstate()),
]
