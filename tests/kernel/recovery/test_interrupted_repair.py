"""A repair whose new process or notebook dies half-way: reported at once, and completed by another repair."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint, until

WHOLE = "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), globals().get('kept')"


class NewProcesses:
    """Sends a signal to each process that the agent forks inside the block."""

    def __init__(self, agent: int, number: int) -> None:
        self._agent, self._number = psutil.Process(agent), number
        self._known = {child.pid for child in self._agent.children()}
        self._over = threading.Event()
        self.found = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.002):
            for child in self._agent.children():
                if child.pid not in self._known:
                    self._known.add(child.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.send_signal(self._number)
                    self.found.set()

    def __enter__(self) -> NewProcesses:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def three() -> Iterator[Kernel]:
    """A kernel with 3 ranks, of which rank 2 is dead."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3")
        kernel.ok("%%distributed\nkept = rank")
        kernel.run("%%distributed\nimport os\nif rank == 2: os._exit(3)")
        yield kernel


def test_killed_replacement_is_reported_at_once(three: Kernel) -> None:
    with NewProcesses(footprint(three).agent, signal.SIGKILL):
        reply = three.run("%distributed repair")
    assert reply.ename == "StartError", (reply.stdout, reply.stderr)
    assert "Rank 2 failed to start: it was killed by SIGKILL" in reply.traceback
    assert "Run `%distributed repair` to try again." in reply.traceback
    assert reply.seconds < 15, "without waiting for the new process's time limit of 30 s"
    assert "Replaced rank 2" in three.ok("%distributed repair").stdout
    assert sorted(three.ok(WHOLE).lines()) == ["[rank 0] (3.0, 0)", "[rank 1] (3.0, 1)", "[rank 2] (3.0, None)"]


def test_interrupt_ends_the_wait_for_a_replacement(three: Kernel) -> None:
    with NewProcesses(footprint(three).agent, signal.SIGSTOP) as new:
        request = three.submit("%distributed repair")
        assert new.found.wait(120)
        time.sleep(0.5)
        three.interrupt()
        reply = three.collect(request)
    assert "Interrupted before rank 2 started. Run `%distributed repair` to try again." in reply.traceback
    assert "Replaced rank 2" in three.ok("%distributed repair").stdout
    assert sorted(three.ok(WHOLE).lines()) == ["[rank 0] (3.0, 0)", "[rank 1] (3.0, 1)", "[rank 2] (3.0, None)"]


def test_attach_reports_a_rank_left_by_a_killed_repair(three: Kernel) -> None:
    cluster = footprint(three)
    with NewProcesses(cluster.agent, signal.SIGSTOP) as new:
        three.submit("%distributed repair")
        assert new.found.wait(120)
        three.come_back()
    reply = three.ok("%load_ext axon_nb\n%distributed attach")
    assert "Idle rank 2 was being replaced when its notebook was killed." in reply.stderr
    assert "Rank 2 was being replaced" in three.run("%%distributed\n1").traceback
    assert "Replaced rank 2" in three.ok("%distributed repair").stdout
    assert sorted(three.ok(WHOLE).lines()) == ["[rank 0] (3.0, 0)", "[rank 1] (3.0, 1)", "[rank 2] (3.0, None)"]
    now = footprint(three)
    three.ok("%distributed stop")
    assert until(now.gone)
    assert until(cluster.gone)
