"""Other hosts join, and their clocks are compared."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from axon_nb.errors import StartError
from axon_nb.host.agent import join_cluster
from axon_nb.host.run_dir import RunDir
from axon_nb.records.protocol.agent import GetInfo, Signal
from axon_nb.records.protocol.wire import PROTOCOL
from axon_nb.records.spans import HostClock
from tests.cluster.launch.second_host import CLOCK_AHEAD_S, IN_OTHER_TIME, one_clock_only
from tests.host.link.conftest import FAR, IP, KEY, Joining, Wiretap, gone, is_alive
from tests.support.processes import until

_DELAY_S = 0.005


def test_ranks_of_a_host_that_joined_are_forked_signalled_and_reported(joining: Joining, tmp_path: Path) -> None:
    process, far = joining.join()
    assert (far.name, far.version.protocol) == (FAR, PROTOCOL)
    assert far.folder != str(joining.first.run_dir.path)
    report = tmp_path / "report"
    rank, pid = joining.fork(far, "report", str(report))
    assert until(report.exists)
    facts = json.loads(report.read_text())
    assert (facts["pid"], facts["ppid"], facts["env"]["AXON_NB_HOST"]) == (pid, process.pid, FAR)
    assert facts["preloaded"]
    assert "AXON_NB_JOIN_KEY" not in facts["env"]
    assert not [name for name in facts["files"] if name.startswith("socket:")]
    assert joining.first.client.call(GetInfo()).ranks == {rank: pid}
    os.kill(pid, signal.SIGSTOP)
    assert until(lambda: joining.first.client.call(GetInfo()).stopped == (rank,))
    assert joining.first.client.call(Signal(rank, int(signal.SIGKILL))).sent
    death = joining.first.event(event="exit", rank=rank)
    assert (death["code"], death["pid"], death["host"], death["host_lost"]) == (-signal.SIGKILL, pid, FAR, "")
    state = joining.first.client.call(GetInfo())
    assert (dict(state.ranks), set(state.deaths)) == ({}, {rank})


def test_keys_of_the_controller_reach_a_host_and_cannot_be_read_on_the_way(joining: Joining) -> None:
    file, server_key = joining.first.run_dir.engine_file, zmq.curve_keypair()[0].decode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"interface": "tcp://127.0.0.1", "key": KEY, "curve_serverkey": server_key}))
    with Wiretap(joining.address) as wire:
        process = joining.start(address=wire.address)
        assert until(joining.hosts), process.communicate(timeout=60)
        far_file = RunDir(Path(joining.hosts()[FAR].folder)).engine_file
        assert until(lambda: far_file.exists() and far_file.read_text()), "a host is known before it has written it"
        facts = json.loads(far_file.read_text())
        assert (facts["key"], facts["curve_serverkey"]) == (KEY, server_key)
        assert b"tcp://127.0.0.1" in wire.seen
        assert KEY.encode() not in wire.seen
        assert server_key.encode() not in wire.seen


def test_last_output_of_a_rank_on_another_host_is_reported(joining: Joining) -> None:
    _, far = joining.join()
    rank, _ = joining.fork(far, "fail")
    assert "this entry fails" in joining.first.event(event="exit", rank=rank)["last_output"]


def test_stop_leaves_nothing_on_either_host(joining: Joining, tmp_path: Path) -> None:
    (process, far), (other, second) = joining.join(), joining.join()
    assert second.name == f"{FAR}-2"  # both call themselves the same
    _, pid = joining.fork(far, "child", str(child := tmp_path / "child"))
    assert until(child.exists)
    joining.first.client.stop(60.0)
    assert process.wait(60) == other.wait(60) == 0
    assert until(lambda: gone(pid, far.folder) and gone(json.loads(child.read_text()), second.folder))


def test_killed_agent_of_a_host_is_reported_with_its_ranks(joining: Joining) -> None:
    process, far = joining.join()
    rank, pid = joining.fork(far, "wait")
    process.kill()
    death = joining.first.event(event="exit", rank=rank)
    assert (death["host"], death["host_lost"]) == (FAR, "its agent closed the connection")
    assert until(lambda: not is_alive(pid))
    assert joining.hosts() == {}
    with pytest.raises(StartError, match=r"The host 'far-host' is not connected; connected: none."):
        joining.fork(far, "wait")
    _, far = joining.join()
    _, pid = joining.fork(far, "wait")
    assert is_alive(pid)


def test_silent_host_is_given_up_and_joins_again_without_its_ranks(joining: Joining) -> None:
    process, far = joining.join()
    rank, pid = joining.fork(far, "wait")
    process.send_signal(signal.SIGSTOP)
    death = joining.first.event(event="exit", rank=rank)
    assert death["host_lost"].startswith("its agent has not responded for ")
    process.send_signal(signal.SIGCONT)
    assert until(lambda: not is_alive(pid))
    assert until(lambda: FAR in joining.hosts())
    rank, pid = joining.fork(joining.hosts()[FAR], "wait")
    assert is_alive(pid)
    story = "joined HH, silent since HH, lost HH, joined again HH"
    assert re.sub(r"\d\d:\d\d:\d\d", "HH", joining.first.client.call(GetInfo()).hosts_lost[FAR]) == story
    process.kill()
    reason = re.sub(r"\d\d:\d\d:\d\d", "HH", joining.first.event(event="exit", rank=rank)["host_lost"])
    assert reason == f"its agent closed the connection ({story}, lost HH)"


def test_agent_that_a_launcher_starts_leaves_the_host_to_the_one_that_is_there(joining: Joining) -> None:
    _, far = joining.join()
    late = joining.start(by_launcher=True)
    assert f"Another agent serves the host {FAR!r} by now, so this one exits." in late.communicate(timeout=60)[0]
    assert {name: facts.folder for name, facts in joining.hosts().items()} == {FAR: far.folder}


def test_agent_that_is_refused_when_it_joins_again_says_why_and_fails(joining: Joining) -> None:
    process, far = joining.join()
    rank, pid = joining.fork(far, "wait")
    process.send_signal(signal.SIGSTOP)
    assert joining.first.event(event="exit", rank=rank)["host_lost"].startswith("its agent has not responded for ")
    _, other = joining.join()  # as a repair has it done
    process.send_signal(signal.SIGCONT)
    assert f"Another agent serves the host {FAR!r} by now, so this one exits." in process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert gone(pid, far.folder)
    assert {name: facts.folder for name, facts in joining.hosts().items()} == {FAR: other.folder}


def test_host_ends_with_the_agent_that_it_joined(joining: Joining) -> None:
    process, far = joining.join()
    _, pid = joining.fork(far, "wait")
    joining.first.process.kill()
    assert process.wait(60) == 0
    assert until(lambda: gone(pid, far.folder))


def test_wrong_key_or_closed_port_is_refused_with_the_fix(joining: Joining) -> None:
    process = joining.start(key="another")
    output = process.communicate(timeout=60)[0]
    assert f"{joining.address} rejected this host" in output
    assert "Use the command, with its key, that `%distributed start --hosts join` printed" in output
    with socket.create_server((IP, 0)) as server:
        closed = f"{IP}:{server.getsockname()[1]}"
    output = joining.start(address=closed).communicate(timeout=60)[0]
    assert f"Nothing listens on {closed}: the cluster is gone, or a firewall closes the port." in output
    assert joining.hosts() == {}


def test_bad_address_or_missing_key_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match=r"--join must be IP:PORT, as .* prints it; got 'far'"):
        join_cluster("far")
    monkeypatch.delenv("AXON_NB_JOIN_KEY", raising=False)
    with pytest.raises(StartError, match=r"The cluster's key is missing. Set AXON_NB_JOIN_KEY"):
        join_cluster("127.0.0.1:1")


def test_random_bytes_do_no_harm(joining: Joining) -> None:
    _, far = joining.join()
    ip, _, port = joining.address.rpartition(":")
    generator = random.Random(7)
    sent = 0
    while sent < 1_000_000:
        data = generator.randbytes(generator.choice([1, 63, 64, 65, 4096, 65536]))
        with socket.create_connection((ip, int(port)), 60) as sock:
            assert len(sock.recv(32)) == 32
            try:
                sock.sendall(data)
                sent += len(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    raise AssertionError("it answered a client that does not know the key")
            except ConnectionError:
                pass
    assert list(joining.hosts()) == [FAR]
    _, pid = joining.fork(far, "wait")
    assert is_alive(pid)


@pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="nohup: all that it starts ignores SIGHUP"
)
def test_closed_terminal_stops_the_host_and_its_ranks(joining: Joining) -> None:
    process, far = joining.join()
    rank, pid = joining.fork(far, "wait")
    process.send_signal(signal.SIGHUP)
    assert joining.first.event(event="exit", rank=rank)["host"] == FAR
    assert process.wait(60) == 0
    assert until(lambda: gone(pid, far.folder))


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            time.sleep(_DELAY_S)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _slow_link(address: str) -> Iterator[str]:
    """An address that leads to another one; everything takes 5 ms in each direction."""
    ip, _, port = address.rpartition(":")
    with socket.create_server((IP, 0)) as server:
        ends: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                near, _ = server.accept()
                far = socket.create_connection((ip, int(port)))
                ends.extend((near, far))
                for one in ends:
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=_pass_on, args=(far, near))
                back.start()
                _pass_on(near, far)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"{IP}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in ends:
            one.close()


def test_clock_of_a_host_behind_a_slow_link_is_found_with_its_error(joining: Joining) -> None:
    if reason := one_clock_only():
        pytest.skip(reason)
    with _slow_link(joining.address) as address:
        process = joining.start(address=address, behind=IN_OTHER_TIME)

        def clock() -> HostClock | None:
            return joining.first.client.call(GetInfo()).clocks.get(FAR)

        def wrong_ns(found: HostClock | None) -> float:
            return abs(found.offset_ns + CLOCK_AHEAD_S * 1e9) if found else float("inf")

        assert until(lambda: (found := clock()) is not None and wrong_ns(found) < 1e6), (clock(), process.poll())
        found = clock()
        assert found is not None
        assert wrong_ns(found) <= found.error_ns
        assert found.error_ns >= _DELAY_S * 1e9  # a link may delay one direction only: nobody can tell
        joining.first.client.stop(60.0)
