"""When an agent stops, together with everything that it started: not while it is needed, and not much later."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from axon_nb.errors import ClusterLostError, StartError
from axon_nb.host.client import AgentClient, spawn_agent
from axon_nb.host.run_dir import RunDir
from axon_nb.records.protocol.agent import GetInfo, ReportActivity, SetInfo
from tests.host.conftest import MakeAgent
from tests.support.agents import ROOT, RawPeer, Served, facts
from tests.support.processes import ended, until

STARTER = (
    "import sys, time\nfrom axon_nb.host.client import spawn_agent\nfrom axon_nb.host.run_dir import RunDir\n"
    "run_dir = RunDir.create()\npid = spawn_agent(run_dir, controller=sys.argv[1:], entry='')\n"
    "end = time.monotonic() + 60\n"
    "while not (run_dir.path / 'agent.json').exists() and time.monotonic() < end: time.sleep(0.01)\n"
    "print(run_dir.path, pid, flush=True)\n"
)


def start_and_leave(then: str = "", controller: list[str] | None = None) -> tuple[RunDir, int]:
    """Have another process start an agent, and end without ever connecting to it; the agent's folder and pid."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STARTER + then, *(controller or [])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    path, pid = done.stdout.split()
    return RunDir(Path(path)), int(pid)


def vanishes(run_dir: RunDir, pid: int) -> bool:
    """Whether process and folder go; they may be gone already."""
    return until(lambda: not run_dir.path.exists() and not _runs(run_dir, pid), timeout=90)


def _runs(run_dir: RunDir, pid: int) -> bool:
    try:
        return f"--run-dir={run_dir.path}" in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:  # it is gone, or a zombie
        return False


def stays(served: Served, seconds: float) -> bool:
    """Whether the agent still answers `seconds` later."""
    with RawPeer(served.run_dir.agent_socket) as observer:
        observer.sock.settimeout(seconds)
        try:
            observer.sock.recv(1)  # ends early when the agent does
        except TimeoutError:
            return True
        except ConnectionError:
            return False
        return False


def test_agent_stops_if_its_starter_exits_unconnected() -> None:
    assert vanishes(*start_and_leave())


def test_agent_stops_if_its_starter_is_killed() -> None:
    assert vanishes(*start_and_leave("import os; os.kill(os.getpid(), 9)"))


def test_observer_does_not_keep_the_agent_alive() -> None:
    run_dir, pid = start_and_leave()
    try:
        observer = AgentClient(run_dir, owner="")
    except (StartError, ClusterLostError):  # it was quicker
        observer = None
    assert vanishes(run_dir, pid)
    if observer is not None:
        assert observer.closed.wait(60)
        observer.close()


def test_owner_keeps_the_agent_alive_after_starter_exit() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", STARTER + "sys.stdin.read()"],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as starter:  # fmt: skip
        assert starter.stdout is not None
        path, pid = starter.stdout.readline().split()
        client = AgentClient(RunDir(Path(path)), owner="the tests")
    assert client.closed.wait(1.5) is False
    assert client.call(GetInfo()).pid == int(pid)
    assert client.stop(60.0)


def test_warm_agent_stops_at_once_without_owner(make_agent: MakeAgent) -> None:
    served = make_agent()
    served.client.close()
    assert until(served.gone)


def test_cluster_survives_for_exactly_its_keep_alive(make_agent: MakeAgent) -> None:
    served = make_agent()
    served.client.call(SetInfo(facts(keep_alive_s=0.8)))
    left = time.monotonic()
    served.client.close()
    assert until(served.gone)
    assert time.monotonic() - left > 0.75


def test_reattach_within_keep_alive_keeps_the_cluster(make_agent: MakeAgent) -> None:
    later, keep_alive = None, 0.5
    while later is None:
        served = make_agent()
        served.client.call(SetInfo(facts(keep_alive_s=keep_alive)))
        served.client.close()
        try:
            later = AgentClient(served.run_dir, owner="the same notebook")
        except (StartError, ClusterLostError):  # on a busy machine that was too late
            assert keep_alive < 30
            keep_alive *= 4
    assert later.hello_reply.info == facts(keep_alive_s=keep_alive, owner="the same notebook")
    assert later.closed.wait(2 * keep_alive) is False
    assert later.stop(60.0)


def test_agent_lives_as_long_as_any_owner(make_agent: MakeAgent) -> None:
    served = make_agent()
    other = AgentClient(served.run_dir, owner="another")
    served.client.close()
    assert other.closed.wait(0.5) is False
    other.close()
    assert until(served.gone)


def test_disconnecting_observer_has_no_effect(make_agent: MakeAgent) -> None:
    served = make_agent()
    AgentClient(served.run_dir, owner="").close()
    assert stays(served, 0.5)


@pytest.mark.parametrize("keep_alive", [30 * 86400, float("inf")], ids=["a month", "for ever"])
def test_long_keep_alive_is_respected(make_agent: MakeAgent, keep_alive: float) -> None:
    served = make_agent()
    served.client.call(SetInfo(facts(keep_alive_s=keep_alive)))
    served.client.close()
    assert stays(served, 0.5)
    AgentClient(served.run_dir, owner="the tests").stop(60.0)
    assert until(served.gone)


def test_stop_leaves_no_processes_or_files(make_agent: MakeAgent) -> None:
    served = make_agent()
    assert served.client.stop(60.0)
    assert until(served.gone)
    with pytest.raises(ClusterLostError):
        served.client.call(GetInfo())
    with pytest.raises(StartError, match="failed to start"):
        AgentClient(served.run_dir, owner="the tests")


def test_sigterm_leaves_no_processes_or_files(make_agent: MakeAgent) -> None:
    served = make_agent()
    served.process.terminate()
    assert until(served.gone)


def test_agent_ignores_terminal_signals(make_agent: MakeAgent) -> None:
    served = make_agent()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
        served.process.send_signal(number)
    assert served.client.call(GetInfo()).pid == served.process.pid


def test_agent_runs_in_a_separate_session(agent: Served) -> None:
    assert os.getsid(agent.process.pid) == agent.process.pid != os.getsid(0)


CONTROLLER = [sys.executable, "-c", "import signal; signal.pause()"]
"""Any process will do: the agent only starts it, watches it and stops it."""


def test_controller_ends_when_the_agent_stops(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    controller = psutil.Process(served.client.call(GetInfo()).controller)
    served.client.stop(60.0)
    assert until(lambda: ended(controller))


def test_controller_ends_when_the_agent_is_killed(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    controller = psutil.Process(served.client.call(GetInfo()).controller)
    assert until(lambda: "signal.pause" in " ".join(controller.cmdline()))
    served.process.kill()
    assert until(lambda: ended(controller))


def test_cluster_stops_when_its_controller_dies(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    psutil.Process(served.client.call(GetInfo()).controller).kill()
    assert served.event(event="controller_exit")["code"] == -signal.SIGKILL
    assert served.client.end_reason == "The ipyparallel controller was killed by signal 9 without any output."
    assert until(served.gone)


BROKEN = "raise SystemExit(print('\\nno such port\\n') or 4)"
EXIT_REASON = "The ipyparallel controller exited with code 4: no such port"


def test_controller_exit_before_connect_is_reported(run_dir: RunDir) -> None:
    pid = spawn_agent(run_dir, controller=[sys.executable, "-c", BROKEN], entry="")
    log = run_dir.path / "log" / "controller.log"
    assert until(lambda: log.exists() and log.stat().st_size and not psutil.Process(pid).children())
    with pytest.raises(StartError) as caught:
        AgentClient(run_dir, owner="the tests", agent_pid=pid)
    assert str(caught.value) == EXIT_REASON
    assert vanishes(run_dir, pid)


def test_controller_exit_during_connect_is_reported(make_agent: MakeAgent, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    code = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n{BROKEN}"
    served = make_agent(controller=[sys.executable, "-c", code])
    assert served.client.end_reason == ""
    go_on.touch()
    assert served.client.closed.wait(60)
    assert served.client.end_reason == EXIT_REASON
    assert until(served.gone)


def test_controller_exit_on_stop_is_not_reported(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    assert served.client.stop(60.0)
    assert served.client.end_reason == ""


def test_unconnected_agent_with_broken_controller_stops() -> None:
    assert vanishes(*start_and_leave(controller=[sys.executable, "-c", BROKEN]))


def test_failed_agent_start_reports_cause(run_dir: RunDir) -> None:
    (run_dir.path / "log" / "agent.log").write_text("the disk\nis full\n")
    with pytest.raises(StartError, match=r"failed to start: the disk \| is full"):
        AgentClient(run_dir, owner="the tests")


def test_concurrent_attaches_give_one_owner(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent.client.call(SetInfo(facts(keep_alive_s=60.0)))
    with pytest.raises(StartError, match="is in use by another notebook"):
        AgentClient(agent.run_dir, owner="early", exclusive=True)
    agent.client.close()

    def attached() -> bool:
        with contextlib.closing(AgentClient(agent.run_dir, owner="")) as observer:
            return observer.hello_reply.attached

    assert until(lambda: not attached())
    connected: list[AgentClient] = []
    refused: list[StartError] = []

    def attach(owner: str) -> None:
        try:
            connected.append(AgentClient(agent.run_dir, owner=owner, exclusive=True))
        except StartError as error:
            refused.append(error)

    threads = [threading.Thread(target=attach, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(connected), len(refused)) == (1, 3)
    connected[0].stop(60.0)
    connected[0].close()


def test_idle_cluster_stops_itself_and_says_so_but_never_while_a_cell_runs(make_agent: MakeAgent) -> None:
    served = make_agent()
    served.client.call(ReportActivity(busy=True))
    served.client.call(SetInfo(replace(facts(), idle_stop_s=0.3)))
    assert served.client.closed.wait(1.0) is False
    served.client.call(ReportActivity(busy=False))
    ended_at = time.monotonic()
    assert served.event(event="idle_stop")["idle_s"] >= 0.3
    assert until(served.gone)
    assert time.monotonic() - ended_at > 0.25
