"""Arrays of another library on a card, as CuPy's are: compared by value, pulled without the library, pushed."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

# Only the ranks have this library. Its text does not show all elements, and its memory is not the CPU's.
LIBRARY = """
import sys, types, numpy
cardpy = types.ModuleType("cardpy")
class Array:
    __module__, __qualname__ = "cardpy", "Array"
    def __init__(self, values):
        self._values = numpy.array(values, dtype=numpy.float32)
        self.shape, self.dtype, self.nbytes = self._values.shape, self._values.dtype, self._values.nbytes
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, *, dl_device=None, **options):
        if dl_device != (1, 0):
            raise BufferError("on the card")
        return self._values.__dlpack__()
    def __repr__(self):
        return "array([0., 1., 2., ..., 9997., 9998., 9999.])"
cardpy.Array = Array
sys.modules["cardpy"] = cardpy
"""
SETUP = f"""%%distributed
{LIBRARY}
values = numpy.arange(10_000)
same = cardpy.Array(values)
values[5000] += rank == 2
odd = cardpy.Array(values)
nested = {{"first": [odd], "rank": rank}}
long = "x" * 1000 + str(rank)
on_host = numpy.full(3, rank)
host = types.SimpleNamespace(__array_interface__=on_host.__array_interface__)
"""


@pytest.fixture(scope="module")
def ready(shared_kernel: Kernel) -> Kernel:
    shared_kernel.ok(SETUP)
    shared_kernel.ok("from axon_nb.cluster.session import current\nc = current.require('t')")
    return shared_kernel


def test_table_has_shapes_and_compares_values(ready: Kernel) -> None:
    ready.ok("rows = {row['name']: row for row in c.variables().to_dict('records')}")
    columns = ("type", "shape", "dtype", "device", "ranks")
    assert ready.value(f"[rows['same'][name] for name in {columns}]") == ["Array", "10000", "float32", "cuda:0", "same"]
    assert ready.value("rows['odd']['ranks'], rows['host']['shape']") == ("differs on rank 2", "3")


def test_difference_hidden_by_repr_is_detected(ready: Kernel) -> None:
    assert ready.value("c.diff('odd').values.tolist()") == [["odd", 2, 1, 10_000, "[5000]", 1.0, "5000.0 / 5001.0"]]
    assert ready.value("len(c.diff('same')), len(c.diff('host'))") == (0, 3)


def test_long_reprs_with_equal_prefix_differ(ready: Kernel) -> None:
    assert ready.value("c.diff('long')['rank'].tolist()") == [1, 2, 3]


def test_foreign_arrays_are_pulled_as_numpy_without_the_library(ready: Kernel) -> None:
    assert ready.value("a = c.pull('odd', ranks=2)\n(type(a).__name__, a.shape, float(a[5000]))") == (
        "ndarray",
        (10_000,),
        5001.0,
    )
    assert ready.value("type(c.pull('nested', ranks=1)['first'][0]).__name__") == "ndarray"
    assert ready.value("type(c.run('odd', quiet=True)[0]).__name__") == "ndarray"
    assert "No module named 'cardpy'" in ready.run("%pull odd --ranks 2 --as-is").traceback


def test_foreign_arrays_are_pushed_as_numpy_unless_as_is(ready: Kernel) -> None:
    ready.ok(f"{LIBRARY}\nmine = cardpy.Array([1, 2, 3])")
    ready.ok("%push mine")
    kinds = "dict(c.run('type(mine).__name__', quiet=True).values)"
    assert set(ready.value(kinds).values()) == {"ndarray"}
    ready.ok("%push mine --as-is")
    assert set(ready.value(kinds).values()) == {"Array"}
    ready.ok("del sys.modules['cardpy']")
