"""A failed cell keeps no memory: its functions' local variables are freed before the next cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cell_output import by_rank
from tests.support.kernel import Kernel
from tests.support.processes import until

PREPARE = """%%distributed
import gc, time, weakref
kept = []
def hold():
    big = torch.zeros(1000)
    kept.append(weakref.ref(big))
    dist.barrier()  # all come this far before one of them fails, which ends the others
    return big
def raises():
    big = hold()
    raise ValueError("as asked")
def waits():
    big = hold()
    if rank == 0:
        raise ValueError("as asked")
    dist.barrier()
def works(folder):
    big = hold()
    open(f"{folder}/{rank}", "w").close()
    while True:
        big += 1
def runs_out():
    big = hold()
    try:
        raise MemoryError("out of memory")
    except MemoryError as error:
        mine = error  # the frame holds the error, which holds the frame
        raise
def returns(big):
    return big.sum()
gc.disable()
"""
LOOK = "%%distributed\nlen(kept), [ref() is None for ref in kept], gc.isenabled()"


@pytest.fixture
def kernel(own_kernel: Kernel) -> Kernel:
    own_kernel.ok(PREPARE)
    return own_kernel


def _expect_all_free(kernel: Kernel, count: int) -> None:
    freed = f"({count}, {[True] * count}, False)"
    assert by_rank(kernel.ok(LOOK).stdout) == {0: [freed], 1: [freed]}
    kernel.ok("%%distributed\ngc.enable()")


@pytest.mark.parametrize("call", ["raises", "waits", "runs_out"])
def test_failed_cell_releases_local_tensors(kernel: Kernel, call: str) -> None:
    reply = kernel.run(f"%%distributed\n{call}()")
    assert not reply.ok
    assert "as asked" in reply.traceback or "out of memory" in reply.traceback
    _expect_all_free(kernel, 1)


def test_error_raised_in_handler_releases_local_tensors(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\ntry:\n    raises()\nexcept ValueError:\n    raises()")
    assert "During handling of the above exception" in reply.traceback
    _expect_all_free(kernel, 2)


def test_failed_async_cell_releases_local_tensors(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\nimport asyncio\nawait asyncio.sleep(0)\nraises()")
    assert "as asked" in reply.traceback
    _expect_all_free(kernel, 1)


def test_failed_module_function_releases_local_tensors(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text("def train(hold):\n    big = hold()\n    raise ValueError('as asked')\n")
    kernel.ok(f"%%distributed\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport training")
    reply = kernel.run("%%distributed\ntraining.train(hold)")
    assert "raise ValueError('as asked')" in reply.traceback
    _expect_all_free(kernel, 1)


def test_interrupted_cell_releases_local_tensors(kernel: Kernel, tmp_path: Path) -> None:
    request = kernel.submit(f"%%distributed\nworks({str(tmp_path)!r})")
    assert until(lambda: len(list(tmp_path.iterdir())) == 2)
    kernel.interrupt()
    assert not kernel.collect(request).ok
    _expect_all_free(kernel, 1)
