"""Any object is restored, cannot change, or is named: types and in-place methods of the installed packages."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from axon_nb.comm.collectives.arguments import prepare_move
from axon_nb.engine.snapshot.history import History
from axon_nb.engine.snapshot.memory import HostMemory
from axon_nb.engine.values import tensor_bytes
from axon_nb.parallel.checkpoint.saving import _bytes
from axon_nb.shell.value_pickle import pack, unpack
from tests.unit.engine.test_snapshot import ENOUGH, Counts

RESTORED = """
import array, collections, functools, io, logging, queue, random, threading, types, weakref
import numpy as np
import pandas as pd
import torch
from IPython.display import HTML

frame = pd.DataFrame({"a": [1, 2], "s": ["x", "y"]}); column = frame["a"]; copy = frame.copy()
series = pd.Series([1.0, 2.0]); texts = pd.Series(["a", "b"]); kinds = pd.Series(["a", "b"], dtype="category")
objects = pd.Series(["a", [1]], dtype=object); dates = pd.Series(pd.date_range("2024", periods=2))
nullable = pd.Series([1, None], dtype="Int64"); levels = pd.MultiIndex.from_product([[1, 2], ["x"]], names=["p", "q"])
categories = pd.Categorical(["a", "b"]); sparse = pd.arrays.SparseArray([0, 0, 1])
masked = np.ma.array([1.0, 2.0, 3.0]); hidden = np.ma.array([1, 2], mask=[False, True]); matrix = np.matrix([[1, 2]])
records = np.rec.array([(1, 2.0)], dtype=[("n", "i4"), ("x", "f4")]); record = np.zeros(2, "i4,f4")[0].copy()
mixed = np.array([[1], "a", None], dtype=object); frozen = np.arange(3); frozen.flags.writeable = False
gaps = np.zeros((4, 4))[::2, ::2].copy(order="F")[:, ::-1]; numbers = np.arange(6)
draws = np.random.default_rng(5); old_draws = np.random.RandomState(1)
storage = torch.zeros(3).untyped_storage()
logger = logging.Logger("t"); handler = logging.NullHandler(); logger.addHandler(handler); logger.isEnabledFor(10)
pattern = logging.Formatter("%(message)s", style="%"); chosen = logging.Filter("a"); page = HTML("<b>a</b>")
stream = io.BytesIO(b"abc"); text = io.StringIO("abc"); raw = bytearray(b"abc"); view = memoryview(bytearray(b"abc"))
table = collections.defaultdict(list, a=[1]); words = collections.Counter("aab"); chain = collections.ChainMap({"a": 1})
machine = array.array("i", [1, 2]); jobs = queue.Queue(); stop = threading.Event()
local = threading.local(); local.n = 1
space = types.SimpleNamespace(a=1); error = ValueError(1); missing = OSError(2, "no")
call = functools.partial(print, 1, end=""); append = [1].append
class Key: pass
key = Key()
weak = weakref.WeakValueDictionary(a=key); weak_keys = weakref.WeakKeyDictionary({key: [1]})
position = iter([1, 2, 3]); backwards = reversed([1, 2, 3])
def scale(x, by=[2]): return x * by[0]
class Sized:
    @staticmethod
    def log(message, seen=[]): seen.append(message); return len(seen)
    @property
    def size(self): return 1
@functools.lru_cache
def cached(n): return n
"""
CHANGES = [
    "frame.loc[0, 'a'] = 9; frame['b'] = 1",
    "frame.iloc[1, 1] = 'changed'; frame.insert(1, 'c', 5)",
    "frame.drop(columns='a', inplace=True); frame.rename(columns={'s': 'q'}, inplace=True)",
    "frame.index = ['i', 'j']; frame.columns.name = 'names'; frame.attrs['from'] = 1",
    "frame.sort_values('a', ascending=False, inplace=True); frame.pop('s')",
    "frame.flags.allows_duplicate_labels = False; frame.at[1, 'a'] = 4; copy.loc[1, 's'] = 'z'",
    "frame.set_index('s', inplace=True); frame.update(frame * 2)",
    "view_of = frame['a']; view_of[0] = 7; frame.fillna(0, inplace=True); frame.loc[5] = [1, 'n']",
    "series[0] = 99.0; series.name = 'x'; column.iloc[0] = 5",
    "texts[0] = 'changed'; kinds[0] = 'b'; objects[0] = 'changed'; objects[1].append(2)",
    "dates[0] = pd.Timestamp('2000'); nullable[0] = 9; nullable[1] = 3",
    "levels.names = ['r', 's']; categories[0] = 'b'; sparse.fill_value = 1",
    "categories.__setstate__(pd.Categorical(['n']).__reduce__()[2])",
    "masked[0] = np.ma.masked; masked[1] = 7; hidden.mask[0] = True; hidden.fill_value = 3; hidden.harden_mask()",
    "matrix[0, 0] = 5; records.n[0] = 7; record['f0'] = 5; mixed[0].append(2); mixed[1] = 'b'",
    "frozen.flags.writeable = True; frozen[0] = 9; numbers.shape = (2, 3); numbers[0] = 5",
    "numbers.dtype = 'f8'; numbers.flags.writeable = False; gaps[0, 0] = 4",
    "draws.random(); draws.spawn(2); old_draws.rand(); storage[0] = 7",
    "logger.setLevel(30); logger.removeHandler(handler); logger.disabled = True; handler.setLevel(40)",
    "pattern.datefmt = '%H'; pattern._style._fmt = 'x'; chosen.name = 'b'; page.data = 'c'; page.metadata['new'] = 1",
    "stream.read(2); stream.write(b'more'); text.write('more'); raw.append(4); view[0] = 5",
    "table['new'].append(1); table['a'].append(2); table.default_factory = None; words.update('ab'); chain['b'] = 2",
    "machine.append(3); machine[0] = 9; jobs.put(1); stop.set(); local.n = 2; local.m = 3",
    "space.a = 2; error.args = (2,); error.__cause__ = missing; missing.errno = 5; missing.filename = 'x'",
    "call.keywords['end'] = 'x'; call.__setstate__((len, (), {}, {})); append(2)",
    "weak.clear(); weak_keys[key].append(2); del key, weak_keys",
    "next(position); next(backwards); scale.__defaults__[0].append(1); scale.__code__ = (lambda x: x).__code__",
    "Sized.log('a'); Sized.size = 2; cached(1); cached(2)",
]
NAMED = """
import decimal, functools, hashlib, itertools, multiprocessing, sqlite3, zlib
import torch
digest = hashlib.sha256(); database = sqlite3.connect(":memory:"); packer = zlib.compressobj()
context = decimal.Context(); pairs = zip([1], [2]); count = itertools.count()
scripted = torch.jit.script(torch.nn.Linear(1, 1))
within = {"a": [digest]}; happened = multiprocessing.Event()
@functools.lru_cache
def cached(n): return [n]
cached(1)
"""


def owner(value: Any) -> list[Any]:
    """What a bound method is bound to."""
    return [] if inspect.ismodule(bound := getattr(value, "__self__", None)) else [bound]


ALONE = ("lock", "RLock", "Condition", "module", "function", "staticmethod", "property", "Key")
SHOWN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(ALONE, lambda _: ()),
    **dict.fromkeys(("WeakValueDictionary", "WeakKeyDictionary", "WeakSet"), lambda value: sorted(map(id, value))),
    **dict.fromkeys(("builtin_function_or_method", "method"), owner),
    **dict.fromkeys(("list_iterator", "list_reverseiterator"), lambda value: [str(value.__reduce__()[1:])]),
    "Logger": lambda value: (value.level, value.disabled, value.propagate, value.handlers, value.isEnabledFor(10)),
    "NullHandler": lambda value: (value.level, value.filters),
    "UntypedStorage": bytes,
    "memoryview": bytes,
    "Generator": lambda value: (
        value.get_state().tolist() if isinstance(value, torch.Generator) else (value.bit_generator,)
    ),
    "_local": lambda value: sorted(vars(value).items()),
    "_lru_cache_wrapper": lambda value: value.cache_info(),
    "defaultdict": lambda value: (value.default_factory, dict(value)),
}
"""By the name of a type that pickle refuses, or does not show the whole of: what its objects hold."""


class Leaves(pickle.Pickler):
    """Pickles what pickle refuses, too."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle one object."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return tuple, ((value.detach().clone().numpy().tobytes(), value.dtype, tuple(value.shape), vars(value)),)
        if isinstance(value, np.ndarray):
            plain = value.view(np.ndarray)
            content = plain.ravel().tolist() if plain.dtype.hasobject else plain.tobytes()
            layout = (plain.shape, plain.strides, str(plain.dtype), plain.flags.writeable)
            return tuple, ((content, layout, dict(getattr(value, "__dict__", {}))),)
        if isinstance(value, np.random.BitGenerator):
            return str, (f"{value.state} {getattr(value.seed_seq, 'n_children_spawned', '')}",)
        if (shown := SHOWN.get(kind.__name__)) is not None:
            return tuple, (tuple(shown(value)),)
        if isinstance(value, BaseException):
            return tuple, ((value.args, id(value.__cause__), vars(value), getattr(value, "errno", 0)),)
        return NotImplemented


def content(value: Any) -> bytes:
    """What an object holds."""
    file = io.BytesIO()
    Leaves(file).dump(value)
    return file.getvalue()


def content_or_text(value: Any) -> bytes:
    """What an object holds, as far as it shows; the name of its type if it shows nothing."""
    for shown in (content, lambda value: repr(value).encode()):
        with contextlib.suppress(Exception):
            return shown(value)
    return repr(type(value)).encode()


def look(space: dict[str, Any], names: list[str]) -> dict[str, bytes]:
    return {name: content(space.get(name)) for name in names}


def variables(source: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(source, space)
    return space


def undo(history: History, run: str = "1") -> tuple[dict[str, str], str]:
    """Undo a cell; what was named before, and while it was restored."""
    snapshot = history.cells[-1].snapshot
    assert snapshot is not None, history.cells[-1].missing
    return dict(snapshot.state.obstacles), "\n".join(history.undo(run))


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, and no warnings of what the drawn methods do."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("apart")
def test_everyday_objects_are_restored_and_not_named() -> None:
    space = variables(RESTORED)
    names = [name for name, value in space.items() if not inspect.ismodule(value) and not name.startswith("__")]
    names = [name for name in names if not isinstance(space[name], type)]
    history = History(space, Counts(), HostMemory())
    history.before_cell("first", 0, (0,), ENOUGH)  # looking for attributes makes a dict for them
    before = look(space, names)
    for number, change in enumerate(CHANGES):
        values = [space["scale"](1), space["Sized"]().size, list(space["jobs"].queue)]
        history.before_cell(str(number), number, (0,), ENOUGH)
        exec(change, space)
        assert undo(history, str(number)) == ({}, ""), change
        after = look(space, names)
        assert [name for name in names if before[name] != after[name]] == [], change
        assert values == [space["scale"](1), space["Sized"]().size, list(space["jobs"].queue)]
        assert space["frame"].loc[0].tolist() == [1, "x"], "the frame works"


@pytest.mark.usefixtures("apart")
def test_what_has_no_exact_way_is_named() -> None:
    space = variables(NAMED)
    history = History(space, Counts(), HostMemory())
    history.before_cell("1", 1, (0,), ENOUGH)
    named, _ = undo(history)
    assert named == {
        "digest": "a _hashlib.HASH",
        "database": "a sqlite3.Connection",
        "packer": "a zlib.Compress",
        "context": "a decimal.Context",
        "pairs": "an iterator",
        "count": "an itertools.count",
        "scripted": "a torch.ScriptModule",
        "within": "a _hashlib.HASH",
        "happened": "a multiprocessing.synchronize.Event",
        "cached": "a cache of calls",
    }


def test_iterator_that_the_cell_has_exhausted_is_named() -> None:
    space: dict[str, Any] = {"position": iter([1])}
    history = History(space, Counts(), HostMemory())
    history.before_cell("1", 1, (0,), ENOUGH)
    list(space["position"])
    assert undo(history) == ({}, "`position` (a list_iterator: it was exhausted)")


MODULES = [
    "array", "bz2", "collections", "csv", "datetime", "decimal", "difflib", "email.message", "fractions",
    "functools", "graphlib", "hashlib", "hmac", "io", "ipaddress", "itertools", "lzma", "networkx", "numpy", "numpy.ma",
    "numpy.polynomial", "numpy.random", "pandas", "pandas.arrays", "pydantic_core", "queue", "random", "regex", "rpds",
    "scipy.interpolate", "scipy.sparse", "scipy.spatial", "sklearn.neighbors", "sklearn.preprocessing",
    "sortedcontainers", "sqlite3", "statistics", "string", "tokenizers", "torch", "torch.distributions", "torch.nn",
    "torch.utils.data", "types", "uuid", "weakref", "xml.etree.ElementTree", "zlib", "PIL.Image", "kiwisolver",
    "lxml", "msgpack", "contextvars", "http.cookies", "zoneinfo",
]  # fmt: skip
OUTSIDE = (
    "DataLoader", "ExcelFile", "ExcelWriter", "FileIO", "HDFStore", "IOBase", "RawIOBase", "TextIOBase", "memmap",
    "Thread", "Simple", "Stream", "Event", "Window", "Package", "DisableTorchFunction", "Await", "CallStack",
    "DataPipe", "ElementTree", "FileReader", "FileWriter",
)  # fmt: skip
"""Classes that write files, wait, or only work within C++."""
WITHOUT = (
    "_", "acquire", "apply", "backward", "block", "boxplot", "close", "cuda", "dump", "from_file", "get", "hist", "ipu",
    "iterdump", "join", "load", "map_", "mro", "new", "pin_memory", "plot", "put", "record_stream", "register",
    "release", "resize", "save", "share", "show", "shutdown", "to_", "tofile", "trace", "wait", "with_traceback", "xpu",
)  # fmt: skip
ARGUMENTS: list[tuple[Any, ...]] = [
    (), ([3, 1, 2],), ({"a": 1, "b": 2},), ("abc",), (b"abc",), (2,), (2, 3), ("i", [1, 2]),
    ([[1.0, 2.0], [3.0, 5.0]],), ([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 0.0, 4.0]), (":memory:",), (len,),
    (2024, 1, 2), (torch.ones(3),), (0.5, 2.0),
]  # fmt: skip
VALUES: list[Any] = [
    0,
    1,
    2,
    "a",
    "b",
    b"x",
    2.5,
    [1],
    [7, 8],
    {"a": 5},
    None,
    True,
    (0, 1),
    slice(0, 1),
    "i4",
    np.ones(2),
]
OPERATORS = ["__setitem__", "__delitem__", "__iadd__", "__isub__", "__ior__", "__imul__", "__setstate__", "__next__"]


def classes(module: str) -> list[type]:
    """The public classes of a module, if it is installed."""
    with contextlib.suppress(ImportError):
        found = vars(importlib.import_module(module))
        return [
            found[name]
            for name in sorted(found)
            if isinstance(found[name], type)
            and not name.startswith("_")
            and not issubclass(found[name], (BaseException, type))
            and not any(word in name for word in OUTSIDE)
        ]
    return []


def instance(kind: type, draw: random.Random) -> Any:
    """An object of this type, if it is made of simple arguments."""
    for arguments in draw.sample(ARGUMENTS, len(ARGUMENTS)):
        with contextlib.suppress(Exception):
            return kind(*arguments)
    return None


def wrapped(value: Any, draw: random.Random) -> Any:
    """The object as a variable refers to it."""
    closure = lambda: value  # noqa: E731
    closure.__module__ = "__main__"
    return draw.choice([value, [value], {"a": (value,)}, closure])


def change(value: Any, draw: random.Random) -> list[str]:
    """Call methods of an object, and set attributes; those that worked."""
    names = [name for name in dir(type(value)) if not name.startswith(WITHOUT)]
    names += [name for name in OPERATORS if hasattr(type(value), name)] * 3
    done = []
    for _ in range(12):
        if not names:
            break
        name = draw.choice(names)
        arguments = draw.choices(VALUES, k=draw.choice([0, 1, 1, 2]))
        with contextlib.suppress(Exception):
            member = getattr(value, name)
            if callable(member):
                member(*arguments)
            else:
                setattr(value, name, draw.choice([*VALUES, member]))
            done.append(name)
    return done


def check(seeds: range) -> tuple[int, int]:
    """Undo drawn changes; returns how many objects were changed, and how many of these were not named."""
    changed = restored = 0
    for seed in seeds:
        draw = random.Random(seed)
        kinds: list[type] = []
        while not kinds:
            kinds = classes(draw.choice(MODULES))
        kind = draw.choice(kinds)
        if (value := instance(kind, draw)) is None:
            continue
        space: dict[str, Any] = {"__name__": "__main__", "x": wrapped(value, draw)}
        history = History(space, Counts(), HostMemory())
        history.before_cell("1", 1, (0,), ENOUGH)
        before = content_or_text(value)
        done = change(value, draw)
        after = content_or_text(value)
        named, refused = undo(history)
        is_changed = before != after
        changed += is_changed
        if "x" not in named and "`x`" not in refused:
            assert content_or_text(value) == before, f"seed {seed}: {kind} was changed by one of {done}"
            restored += is_changed
    return changed, restored


@pytest.mark.usefixtures("apart")
def test_drawn_types_are_restored_or_named() -> None:
    changed, restored = check(range(40))
    assert changed > restored > 5


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_many_drawn_types_are_restored_or_named() -> None:
    changed, restored = check(range(40, 240))
    assert changed > restored > 25


def _packed(tensor: torch.Tensor) -> bytes:
    found: Any = unpack([bytearray(part) for part in pack(tensor)])
    return bytes(found.clone().view(torch.uint8).numpy())


WAYS: dict[str, Callable[[torch.Tensor], bytes]] = {
    "digest of a variable": tensor_bytes,
    "push and pull": _packed,
    "checkpoint": lambda tensor: bytes(_bytes(tensor)),
    "collective": lambda tensor: bytes(prepare_move(tensor).buffer.numpy()),
}


@pytest.mark.parametrize("way", WAYS)
def test_single_element_of_any_stride_is_sent_as_bytes(way: str) -> None:
    tensor = torch.arange(16, dtype=torch.int16)[8::8]
    assert tensor.stride() == (8,)
    assert WAYS[way](tensor) == bytes([8, 0])
