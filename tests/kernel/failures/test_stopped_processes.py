"""An agent, controller or rank that is stopped (SIGSTOP): the user keeps control, and `stop` ends everything."""

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
def test_stop_button_returns_control(kernel: Kernel, what: str) -> None:
    cluster = footprint(kernel)
    os.kill(cluster.agent, signal.SIGSTOP)
    try:
        request = kernel.submit(f"%%distributed\n{CELLS[what]}")
        kernel.wait_for_output(request, "go", ranks=range(2))
        time.sleep(0.5)
        kernel.interrupt()
        reply = kernel.collect(request)
        assert reply.ename == "CellInterrupt"
        assert "the host agent does not respond" in reply.stderr
        assert kernel.ok("%%distributed\nkept").lines() == ["[rank 0] 0", "[rank 1] 1"]
    finally:
        os.kill(cluster.agent, signal.SIGCONT)
    after = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), kept - rank")
    assert after.lines() == ["Rebuilt the process groups. All ranks keep their state.", "[ranks 0-1] (2.0, 0)"]


def _interrupt_with_a_stopped_process(kernel: Kernel, pid: int) -> str:
    request = kernel.submit("%%distributed\nprint('go', flush=True)\nwhile True: time.sleep(0.1)")
    kernel.wait_for_output(request, "go", ranks=range(2))
    os.kill(pid, signal.SIGSTOP)
    kernel.interrupt()
    reply = kernel.collect(request)
    assert reply.ename == "CellInterrupt"
    return reply.traceback


def test_suspended_controller_is_reported_and_continued(kernel: Kernel) -> None:
    cluster = footprint(kernel)
    try:
        report = _interrupt_with_a_stopped_process(kernel, cluster.controller)
    finally:
        os.kill(cluster.controller, signal.SIGCONT)
    assert "[ranks 0-1] did not receive the interrupt: the controller is stopped (SIGSTOP)" in report
    assert f"Run `kill -CONT {cluster.controller}` to let the controller continue" in report
    first: list[str] = []

    def is_back() -> bool:
        reply = kernel.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), kept - rank")
        first[:] = reply.lines()
        return reply.ok

    assert until(is_back)
    assert first == ["Rebuilt the process groups. All ranks keep their state.", "[ranks 0-1] (2.0, 0)"]


def test_restart_replaces_a_suspended_controller(kernel: Kernel) -> None:
    cluster = footprint(kernel)
    assert "or `%distributed restart`" in _interrupt_with_a_stopped_process(kernel, cluster.controller)
    kernel.ok("%distributed restart")
    assert until(cluster.gone)
    assert kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines() == ["[ranks 0-1] 2.0"]


def test_suspended_rank_is_reported_and_replaced(kernel: Kernel) -> None:
    report = _interrupt_with_a_stopped_process(kernel, footprint(kernel).ranks[1])
    assert "[rank 1] is stopped (SIGSTOP) and does not react to interrupts" in report
    assert "Replaced rank 1" in kernel.ok("%distributed repair --ranks 1").stdout
    assert kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines() == ["[ranks 0-1] 2.0"]


@pytest.mark.parametrize("what", ["agent", "controller"])
def test_stop_ends_everything(kernel: Kernel, what: str) -> None:
    cluster = footprint(kernel)
    os.kill(getattr(cluster, what), signal.SIGSTOP)
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
