"""The agent forks ranks from what it has imported, when one is to be forked, and reports how each ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from axon_nb.errors import StartError
from axon_nb.host.children import LastOutput
from axon_nb.host.client import AgentClient, spawn_agent
from axon_nb.host.run_dir import RunDir
from axon_nb.records.protocol.agent import AgentEvent, GetInfo, Signal
from tests.host.conftest import MakeAgent
from tests.support.agents import ENTRY, ROOT, RawPeer, Served, fork_request
from tests.support.processes import ended, until

CONTROLLER = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]


def published(path: Path, served: Served, pid: int) -> Any:
    """Wait for what a forked rank wrote."""
    rank = psutil.Process(pid)
    assert until(lambda: path.exists() or ended(rank), timeout=90), "the rank did not start"
    assert path.exists(), "\n".join(log.read_text() for log in (served.run_dir.path / "log").glob("rank*.log"))
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Filled by `report`: a rank's report is made once for all tests that read it."""
    return {"folder": tmp_path_factory.mktemp("reports")}


@pytest.fixture
def report(forking_agent: Served, reports: dict[str, Path]) -> dict[str, Any]:
    """A rank's report about itself."""
    path = reports["folder"] / "report.json"
    if not path.exists():
        rank, pid = forking_agent.fork(
            "report",
            str(path),
            env={"ONLY": "this", "PATH": "/bin"},
            cwd=str(reports["folder"]),
            path=[str(ROOT), "/nowhere", *sys.path],
            umask=0o027,
        )
        published(path, forking_agent, pid)
        (reports["folder"] / "rank").write_text(str(rank))
    return dict(json.loads(path.read_text()))


def test_forked_rank_inherits_folder_environment_path_and_umask(
    report: dict[str, Any], reports: dict[str, Path]
) -> None:
    assert report["cwd"] == str(reports["folder"])
    assert {name: report["env"][name] for name in ("ONLY", "PATH")} == {"ONLY": "this", "PATH": "/bin"}
    assert "HOME" not in report["env"]
    assert report["path"][:2] == [str(ROOT), "/nowhere"]
    assert report["argv"] == ["ipengine", "report", str(reports["folder"] / "report.json")]
    assert report["umask"] == 0o027


def test_forked_rank_is_a_separate_process_with_torch_loaded(report: dict[str, Any], forking_agent: Served) -> None:
    assert report["session"] == report["pid"]
    assert report["ppid"] == forking_agent.process.pid
    assert report["preloaded"]
    assert report["default_signals"] == [True, True, True]


def test_oom_killer_prefers_ranks_to_the_kernel(report: dict[str, Any]) -> None:
    assert int(report["oom"]) >= 300


def test_forked_rank_inherits_no_agent_descriptor_but_its_own_memory(
    report: dict[str, Any], reports: dict[str, Path]
) -> None:
    log = [name for name in report["files"] if name.endswith(".log")]
    assert len(log) == 2
    others = [name for name in report["files"] if name not in log and not name.startswith(("/proc/", "/dev/null"))]
    rank = (reports["folder"] / "rank").read_text()
    assert others == [f"/memfd:axon_nb-kept-memory-{rank} (deleted)"]


def test_rank_log_is_owner_only(report: dict[str, Any], reports: dict[str, Path], forking_agent: Served) -> None:
    log = forking_agent.run_dir.rank_log(int((reports["folder"] / "rank").read_text()))
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_ranks_draw_different_random_numbers(forking_agent: Served, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    pids = [forking_agent.fork("report", str(path))[1] for path in paths]
    draws = [published(path, forking_agent, pid)["draws"] for path, pid in zip(paths, pids, strict=True)]
    assert len({draw[0] for draw in draws}) == len({draw[1] for draw in draws}) == len(paths)


@pytest.mark.parametrize(("argv", "code"), [(["exit", "0"], 0), (["exit", "3"], 3), (["fail"], 1), (["no such"], 1)])
def test_rank_exit_code_is_reported(forking_agent: Served, argv: list[str], code: int) -> None:
    rank, pid = forking_agent.fork(*argv)
    event = forking_agent.event(event="exit", rank=rank)
    assert (event["pid"], event["code"]) == (pid, code)
    assert event["time_ns"] > 0
    assert not psutil.pid_exists(pid)


def test_rank_log_has_the_cause_of_failure(forking_agent: Served) -> None:
    rank, _ = forking_agent.fork("fail")
    forking_agent.event(event="exit", rank=rank)
    assert "LookupError: this entry fails" in forking_agent.run_dir.rank_log(rank).read_text()


def test_missing_folder_is_reported_in_the_log(forking_agent: Served, tmp_path: Path) -> None:
    rank, _ = forking_agent.fork("wait", cwd=str(tmp_path / "gone"))
    assert forking_agent.event(event="exit", rank=rank)["code"] == 1
    assert "FileNotFoundError" in forking_agent.run_dir.rank_log(rank).read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signal_reaches_the_rank(forking_agent: Served, number: signal.Signals) -> None:
    rank, _ = forking_agent.fork("wait")
    assert forking_agent.client.call(Signal(rank, int(number))).sent is True
    assert forking_agent.event(event="exit", rank=rank)["code"] == -number
    assert forking_agent.client.call(Signal(rank, int(number))).sent is False


def test_signal_right_after_fork_spares_other_ranks(forking_agent: Served, tmp_path: Path) -> None:
    other, pid = forking_agent.fork("wait", str(tmp_path / "other"))
    published(tmp_path / "other", forking_agent, pid)
    for _ in range(5):
        rank, _ = forking_agent.fork("wait")
        forking_agent.client.call(Signal(rank, int(signal.SIGTERM)))
        assert forking_agent.event(event="exit", rank=rank)["code"] == -signal.SIGTERM
    assert forking_agent.client.call(GetInfo()).ranks.get(other) == pid


def test_invalid_signal_is_rejected(forking_agent: Served) -> None:
    rank, _ = forking_agent.fork("wait")
    with pytest.raises(StartError, match="could not signal"):
        forking_agent.client.call(Signal(rank, 10**6))
    forking_agent.client.call(Signal(rank, 9))


def test_children_of_a_rank_end_with_it(forking_agent: Served, tmp_path: Path) -> None:
    rank, pid = forking_agent.fork("child", str(tmp_path / "child.json"))
    child = psutil.Process(published(tmp_path / "child.json", forking_agent, pid))
    forking_agent.client.call(Signal(rank, int(signal.SIGKILL)))
    forking_agent.event(event="exit", rank=rank)
    assert until(lambda: ended(child))


@pytest.mark.parametrize("missing", ["rank", "env", "cwd", "path", "argv", "umask", "log"])
def test_incomplete_request_forks_nothing(forking_agent: Served, missing: str) -> None:
    before = forking_agent.client.call(GetInfo()).ranks
    request = fork_request(forking_agent.run_dir, "wait")
    del request[missing]
    with RawPeer(forking_agent.run_dir.agent_socket) as peer:
        error = peer.command(id=1, cmd="fork", **request)["error"]
        assert error.startswith(f"Fork: Object missing required field `{missing}`.")
    assert forking_agent.client.call(GetInfo()).ranks == before


def test_exit_events_go_to_owners_only(forking_agent: Served) -> None:
    events: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()
    observer = AgentClient(forking_agent.run_dir, owner="")
    observer.on_event(events.put)
    rank, _ = forking_agent.fork("exit", "0")
    forking_agent.event(event="exit", rank=rank)
    observer.call(GetInfo())
    assert events.empty()
    observer.close()


def test_agent_without_entry_point_forks_nothing(agent: Served) -> None:
    with pytest.raises(StartError, match="does not fork ranks"):
        agent.fork("wait")


def test_stop_kills_ranks_that_ignore_sigterm(make_agent: MakeAgent, tmp_path: Path) -> None:
    served = make_agent(entry=ENTRY)
    _, waiting = served.fork("wait", str(tmp_path / "wait.json"))
    _, stubborn = served.fork("stubborn", str(tmp_path / "stubborn.json"))
    ranks = [psutil.Process(pid) for pid in (waiting, stubborn)]
    assert published(tmp_path / "wait.json", served, waiting) == waiting
    assert published(tmp_path / "stubborn.json", served, stubborn) == stubborn
    assert served.client.stop(60.0)
    assert all(map(ended, ranks))
    assert until(served.gone)


def test_ranks_die_with_a_killed_agent(make_agent: MakeAgent, tmp_path: Path) -> None:
    served = make_agent(entry=ENTRY)
    ranks = [psutil.Process(served.fork(word, str(tmp_path / word))[1]) for word in ("wait", "stubborn")]
    for rank, word in zip(ranks, ("wait", "stubborn"), strict=True):
        assert published(tmp_path / word, served, rank.pid) == rank.pid
    served.process.kill()
    assert until(lambda: all(map(ended, ranks)))
    assert served.client.closed.wait(60)
    assert served.event(event="closed")


def test_missing_entry_point_is_reported_in_the_log(make_agent: MakeAgent) -> None:
    served = make_agent(entry="axon_nb.host.nowhere:run")
    rank, _ = served.fork()
    assert served.event(event="exit", rank=rank)["code"] == 1
    assert "No module named 'axon_nb.host.nowhere'" in served.run_dir.rank_log(rank).read_text()


def _write(path: Path, text: str, *, at: float) -> None:
    path.write_text(path.read_text() + text if path.exists() else text)
    os.utime(path, (at, at))


@pytest.mark.parametrize(
    ("crashed", "written", "expected"),
    [
        (None, -600.0, {"last_output": "said", "crash": ""}),  # in the future: recent, however long this test takes
        (None, 60.0, {"last_output": "", "crash": ""}),
        (20.0, 20.5, {"last_output": "said", "crash": "Fatal"}),
        (20.0, 60.0, {"last_output": "", "crash": "Fatal"}),
    ],
)
def test_only_recent_output_is_reported(
    tmp_path: Path, crashed: float | None, written: float, expected: dict[str, str]
) -> None:
    log, last, now = tmp_path / "rank0.log", LastOutput(), time.time()
    _write(log.with_suffix(".err"), "of the previous rank", at=now)
    last.rank_starting(0, log)
    _write(log.with_suffix(".err"), "said", at=now - written)
    if crashed is not None:
        _write(log.with_suffix(".crash"), "Fatal", at=now - crashed)
    assert last.of(0) == expected
    assert last.of(1) == {}


def test_suspended_agent_is_continued_and_stops(make_agent: MakeAgent) -> None:
    served = make_agent(controller=CONTROLLER)
    controller = psutil.Process(served.client.call(GetInfo()).controller)
    served.process.suspend()
    assert not served.client.responds(0.2)
    assert served.client.stop(60.0)
    assert until(served.gone)
    assert until(lambda: ended(controller))


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
        assert until(lambda: ended(controller))
    finally:
        over.set()
        thread.join()


def _has_torch(served: Served) -> bool:
    return any("libtorch" in one.path for one in served.process.memory_maps())


def test_torch_is_imported_for_the_first_rank() -> None:
    run_dir = RunDir.create()
    pid = spawn_agent(run_dir, controller=[], entry=ENTRY, imports_later=True)
    client = AgentClient(run_dir, owner="the tests", agent_pid=pid)
    served = Served(run_dir, client, psutil.Process(pid), queue.SimpleQueue())
    try:
        assert not client.call(GetInfo()).ready  # others import torch before they answer
        assert not _has_torch(served)
        rank, rank_pid = served.fork("wait")
        assert client.call(GetInfo()).ranks == {rank: rank_pid}
        assert _has_torch(served)
    finally:
        served.end()
