"""When an agent ends, with everything that belongs to it: never while it is needed, never much later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from axon_nb.errors import ClusterGone, StartError
from axon_nb.host.client import AgentClient, spawn_agent
from axon_nb.host.rundir import RunDir
from tests.host.agents import ROOT, RawPeer, Served, dead
from tests.host.conftest import MakeAgent
from tests.kernel.processes import until

STARTER = (
    "import sys, time\nfrom axon_nb.host.client import spawn_agent\nfrom axon_nb.host.rundir import RunDir\n"
    "run_dir = RunDir.create()\npid = spawn_agent(run_dir, controller=sys.argv[1:], entry='')\n"
    "end = time.monotonic() + 20\n"
    "while not (run_dir.path / 'agent.json').exists() and time.monotonic() < end: time.sleep(0.01)\n"
    "print(run_dir.path, pid, flush=True)\n"
)


def start_and_leave(then: str = "", controller: list[str] | None = None) -> tuple[RunDir, psutil.Process]:
    """Have another process start an agent, and end without ever connecting to it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STARTER + then, *(controller or [])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    path, pid = done.stdout.split()
    return RunDir(Path(path)), psutil.Process(int(pid))


def ended(run_dir: RunDir, process: psutil.Process, *, timeout: float) -> bool:
    """Whether process and folder are gone within `timeout` seconds."""
    return until(lambda: not run_dir.path.exists() and dead(process), timeout=timeout)


def stays(served: Served, seconds: float) -> bool:
    """Whether the agent still answers `seconds` later."""
    with RawPeer(served.run_dir.agent_socket) as looker:
        looker.sock.settimeout(seconds)
        try:
            looker.sock.recv(1)  # ends early when the agent does
        except TimeoutError:
            return True
        except ConnectionError:
            return False
        return False


def test_an_agent_ends_when_its_starter_does_before_anyone_came() -> None:
    assert ended(*start_and_leave(), timeout=10)


def test_a_killed_starter_counts_the_same() -> None:
    assert ended(*start_and_leave("import os; os.kill(os.getpid(), 9)"), timeout=10)


def test_who_only_looks_does_not_keep_it() -> None:
    run_dir, process = start_and_leave()
    try:
        looker = AgentClient(run_dir, owner="")
    except (StartError, ClusterGone):  # it was quicker
        looker = None
    assert ended(run_dir, process, timeout=10)
    if looker is not None:
        assert looker.closed.wait(5)
        looker.close()


def test_an_owner_keeps_it_though_its_starter_is_gone() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", STARTER + "sys.stdin.read()"],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as starter:  # fmt: skip
        assert starter.stdout is not None
        path, pid = starter.stdout.readline().split()
        client = AgentClient(RunDir(Path(path)), owner="the tests")
    assert client.closed.wait(1.5) is False
    assert client.call("get_info")["pid"] == int(pid)
    assert client.stop()


def test_a_warm_agent_ends_at_once_when_its_owner_leaves(make_agent: MakeAgent) -> None:
    served = make_agent()
    served.client.close()
    assert until(served.gone, timeout=5)


def test_a_cluster_lives_on_for_its_keep_alive_and_no_longer(make_agent: MakeAgent) -> None:
    served = make_agent()
    served.client.call("set_info", info={"world_size": 1, "keep_alive_s": 0.8})
    left = time.monotonic()
    served.client.close()
    assert until(served.gone, timeout=10)
    assert time.monotonic() - left > 0.75


def test_who_takes_it_up_in_time_keeps_it(make_agent: MakeAgent) -> None:
    served = make_agent()
    served.client.call("set_info", info={"world_size": 1, "keep_alive_s": 0.5})
    served.client.close()
    later = AgentClient(served.run_dir, owner="the same notebook")
    assert later.greeting["info"]["world_size"] == 1
    assert later.greeting["info"]["owner"] == "the same notebook"
    assert later.closed.wait(1.0) is False
    assert later.stop()


def test_it_stays_as_long_as_one_of_its_owners(make_agent: MakeAgent) -> None:
    served = make_agent()
    other = AgentClient(served.run_dir, owner="another")
    served.client.close()
    assert other.closed.wait(0.5) is False
    other.close()
    assert until(served.gone, timeout=5)


def test_a_looker_that_leaves_changes_nothing(make_agent: MakeAgent) -> None:
    served = make_agent()
    AgentClient(served.run_dir, owner="").close()
    assert stays(served, 0.5)


@pytest.mark.parametrize("keep_alive", [30 * 86400, float("inf")], ids=["a month", "for ever"])
def test_a_long_keep_alive_is_kept(make_agent: MakeAgent, keep_alive: float) -> None:
    served = make_agent()
    served.client.call("set_info", info={"world_size": 1, "keep_alive_s": keep_alive})
    served.client.close()
    assert stays(served, 0.5)
    AgentClient(served.run_dir, owner="the tests").stop()
    assert until(served.gone, timeout=5)


def test_stop_leaves_nothing(make_agent: MakeAgent) -> None:
    served = make_agent()
    assert served.client.stop()
    assert until(served.gone, timeout=5)
    with pytest.raises(ClusterGone):
        served.client.call("get_info")
    with pytest.raises(StartError, match="did not come up"):
        AgentClient(served.run_dir, owner="the tests")


def test_a_polite_kill_leaves_nothing(make_agent: MakeAgent) -> None:
    served = make_agent()
    served.process.terminate()
    assert until(served.gone, timeout=5)


def test_signals_of_a_terminal_are_none_of_its_business(make_agent: MakeAgent) -> None:
    served = make_agent()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
        served.process.send_signal(number)
    assert served.client.call("get_info")["pid"] == served.process.pid


def test_it_has_a_session_of_its_own(agent: Served) -> None:
    assert os.getsid(agent.process.pid) == agent.process.pid != os.getsid(0)


BROKEN = [sys.executable, "-c", "raise SystemExit(print('no such port') or 4)"]
CONTROLLER = [sys.executable, "-c", "import signal; signal.pause()"]
"""Any process does: the agent only starts it, watches it and ends it."""


def test_the_controller_ends_with_a_stopped_agent(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    controller = psutil.Process(served.client.call("get_info")["controller"])
    served.client.stop()
    assert until(lambda: dead(controller), timeout=5)


def test_the_controller_ends_with_a_killed_agent(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    controller = psutil.Process(served.client.call("get_info")["controller"])
    assert until(lambda: "signal.pause" in " ".join(controller.cmdline()))
    served.process.kill()
    assert until(lambda: dead(controller), timeout=5)


def test_without_its_controller_a_cluster_is_no_use_and_ends(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    psutil.Process(served.client.call("get_info")["controller"]).kill()
    assert served.event(event="controller_exit")["code"] == -signal.SIGKILL
    assert served.client.ending == "The ipyparallel controller was ended by signal 9, and wrote nothing."
    assert until(served.gone, timeout=5)


def test_a_controller_that_cannot_run_is_told(make_agent: MakeAgent, run_dir: RunDir) -> None:
    pid = spawn_agent(run_dir, controller=BROKEN, entry="")
    agent = psutil.Process(pid)
    assert until(lambda: (run_dir.path / "agent.json").exists() and not agent.children())
    with pytest.raises(StartError, match=r"^The ipyparallel controller ended with exit status 4: no such port$"):
        AgentClient(run_dir, owner="the tests", agent_pid=pid)
    assert until(lambda: not run_dir.path.exists())


def test_an_agent_with_a_broken_controller_ends_when_nobody_comes() -> None:
    assert ended(*start_and_leave(controller=BROKEN), timeout=10)


def test_an_agent_that_does_not_come_up_says_why(run_dir: RunDir) -> None:
    (run_dir.path / "log" / "agent.log").write_text("the disk\nis full\n")
    with pytest.raises(StartError, match=r"did not come up: the disk \| is full"):
        AgentClient(run_dir, owner="the tests")
