"""An agent that does not respond: its client continues it, or kills it with all that it started."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading

import psutil

from axon_nb.records.protocol.agent import GetInfo
from tests.host.conftest import MakeAgent
from tests.support.agents import dead
from tests.support.processes import until

CONTROLLER = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]


def test_suspended_agent_is_continued_and_stops(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    controller = psutil.Process(served.client.call(GetInfo()).controller)
    served.process.suspend()
    assert not served.client.responds(0.2)
    assert served.client.stop(60.0)
    assert until(served.gone)
    assert until(lambda: dead(controller))


def test_agent_that_stays_suspended_is_killed_with_its_children(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    controller = psutil.Process(served.client.call(GetInfo()).controller)
    over = threading.Event()

    def keep_stopped() -> None:
        while not over.wait(0.001):
            with contextlib.suppress(psutil.NoSuchProcess):
                served.process.send_signal(signal.SIGSTOP)

    served.process.suspend()
    thread = threading.Thread(target=keep_stopped)
    thread.start()
    try:
        assert served.client.stop(1.0)
        assert until(served.gone)
        assert until(lambda: dead(controller))
    finally:
        over.set()
        thread.join()
