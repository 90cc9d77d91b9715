"""A host agent that does not respond, as if swapped out: the user keeps control, and `stop` ends everything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint, until


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A kernel with 2 ranks, whose agent goes on in the end."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok("%%distributed\nimport time\nkept = rank")
        yield kernel


CELLS = {
    "Python": "print('go', flush=True)\ntime.sleep(600)",
    "new_group": "print('go', flush=True)\ndist.new_group([0, 1])",
    "a collective": "print('go', flush=True)\nif rank: time.sleep(600)\ndist.barrier()",
}


@pytest.mark.parametrize("what", CELLS)
def test_the_stop_button_gives_control_back(kernel: Kernel, what: str) -> None:
    cluster = footprint(kernel)
    os.kill(cluster.agent, signal.SIGSTOP)
    try:
        request = kernel.submit(f"%%distributed\n{CELLS[what]}")
        kernel.wait_for_output(request, "go", ranks=range(2))
        time.sleep(0.5)
        pressed = time.monotonic()
        kernel.interrupt()
        reply = kernel.collect(request)
        assert time.monotonic() - pressed < 8, "and not after the limits of a rebuild"
        assert reply.ename == "CellInterrupt"
        assert "the host agent does not respond" in reply.stderr
        assert kernel.ok("%%distributed\nkept").lines() == ["[rank 0] 0", "[rank 1] 1"]
    finally:
        os.kill(cluster.agent, signal.SIGCONT)
    assert "Rebuilt the process groups" in kernel.ok("%distributed repair").stdout
    after = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), kept - rank")
    assert after.lines() == ["[ranks 0-1] (2.0, 0)"]


def test_stop_ends_everything(kernel: Kernel) -> None:
    cluster = footprint(kernel)
    os.kill(cluster.agent, signal.SIGSTOP)
    kernel.ok("%distributed stop")
    assert until(cluster.gone)


def test_repair_refuses_at_once(kernel: Kernel) -> None:
    cluster = footprint(kernel)
    kernel.run("%%distributed\nimport os\nif rank: os._exit(3)")
    os.kill(cluster.agent, signal.SIGSTOP)
    try:
        assert "The host agent does not respond" in kernel.run("%distributed repair").traceback
    finally:
        os.kill(cluster.agent, signal.SIGCONT)
    assert "Replaced rank 1" in kernel.ok("%distributed repair").stdout
