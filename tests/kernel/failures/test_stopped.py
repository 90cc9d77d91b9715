"""Ranks and processes that are stopped, not dead: they are named, and work on when they continue."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint, until

STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
CASES = {
    "outside of a call": (
        f"dist.barrier()\nif rank == 1: {STOP}\ndist.all_reduce(torch.ones(1))",
        "(stopped; its last call was barrier): ranks 0,2 have been in all_reduce at line 5 for",
    ),
    "before a message": (
        f"if rank == 1:\n    {STOP}\n    dist.send(torch.ones(1), 0)\nif rank == 0: dist.recv(torch.ones(1), 1)",
        "rank 0 has been in recv at line 6 for",
    ),
}


@pytest.fixture(scope="module")
def three() -> Iterator[Kernel]:
    """A kernel with 3 ranks over shared memory."""
    with Kernel(env={"AXON_NB_CPU_BACKEND": "shm"}) as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3")
        yield kernel


@pytest.mark.parametrize("where", CASES)
def test_suspended_rank_is_named_while_awaited(three: Kernel, where: str) -> None:
    code, text = CASES[where]
    pid = footprint(three).ranks[1]
    request = three.submit(f"%%distributed\nimport os, signal, time\n{code}\n'met'")
    try:
        three.wait_for_output(request, "Waiting for rank 1 (stopped")
        three.wait_for_output(request, text)
    finally:
        os.kill(pid, signal.SIGCONT)
    still_works(three, request)


def test_suspended_rank_is_named_with_its_call(three: Kernel, tmp_path: Path) -> None:
    come, pid = tmp_path / "come", footprint(three).ranks[1]
    wait = f"while rank == 2 and not os.path.exists({str(come)!r}): time.sleep(0.02)"
    request = three.submit(
        f"%%distributed\nimport os, time\n{wait}\ndist.barrier()\ndist.all_reduce(torch.ones(1))\n'met'"
    )
    three.wait_for_output(request, "Waiting for rank 2 (line 3): ranks 0-1 have been in barrier")
    os.kill(pid, signal.SIGSTOP)
    try:
        come.touch()
        three.wait_for_output(
            request, "(stopped in barrier at line 4): ranks 0,2 have been in all_reduce at line 5 for"
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    still_works(three, request)


def still_works(three: Kernel, request: str) -> None:
    """The cell ends, and ranks can communicate."""
    assert three.collect(request).ok
    after = three.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")
    assert after.lines() == ["[ranks 0-2] 3.0"]


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
