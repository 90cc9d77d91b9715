"""The agent survives any input on its sockets: at worst it closes the connection that sent it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from axon_nb.host.store import MAX_MESSAGE, encode
from axon_nb.records.protocol.agent import GetInfo, Signal
from tests.host.conftest import MakeAgent
from tests.support.agents import RawPeer, Served
from tests.support.processes import until

REFUSED = [
    ({"cmd": "dance"}, "unknown command 'dance'"),
    ({}, "unknown command"),
    ({"cmd": None}, "unknown command None"),
    ({"cmd": []}, "unknown command []"),
    ({"cmd": {"a": 1}}, "unknown command"),
    ({"cmd": "hello"}, "Hello: Object missing required field `owner`"),
    ({"cmd": "fork"}, "does not fork ranks"),
    ({"cmd": "signal", "rank": "x", "signal": 9}, "Signal: Expected `int`, got `str` - at `$.rank`"),
    ({"cmd": "signal", "rank": None, "signal": 9}, "Signal: Expected `int`, got `null` - at `$.rank`"),
    ({"cmd": "set_info", "info": 5}, "SetInfo: Expected `object`, got `int` - at `$.info`"),
    ({"cmd": "set_info", "info": {"keep_alive_s": "long"}}, "Expected `float`, got `str` - at `$.info.keep_alive_s`"),
]


@pytest.mark.parametrize(("message", "reason"), REFUSED, ids=[json.dumps(message) for message, _ in REFUSED])
def test_unusable_command_gets_an_error(agent: Served, message: dict[str, object], reason: str) -> None:
    with RawPeer(agent.run_dir.agent_socket) as peer:
        reply = peer.command(id=7, **message)
        assert reply["id"] == 7
        assert reason in reply["error"]
        assert peer.command(id=8, cmd="get_info")["pid"] == agent.process.pid


def test_signal_to_an_unknown_rank_is_reported_as_unsent(agent: Served) -> None:
    assert agent.client.call(Signal(10**6, 9)).sent is False


NO_COMMANDS = [
    pytest.param(b"{not json\n", id="no JSON"),
    pytest.param(b"\xff\xfe\x00\n", id="no text"),
    pytest.param(b"\n", id="nothing"),
    pytest.param(b"[]\n", id="a list"),
    pytest.param(b"17\n", id="a number"),
    pytest.param(b"null\n", id="null"),
    pytest.param(b'"hello"\n', id="a string"),
    pytest.param(b"[" * 100_000 + b"\n", id="deeply nested"),
    pytest.param(b"9" * 5000 + b"\n", id="more digits than Python reads"),
    pytest.param(b"x" * ((16 << 20) + 1), id="a line without end"),
]


@pytest.mark.parametrize("data", NO_COMMANDS)
def test_invalid_command_closes_only_its_connection(agent: Served, data: bytes) -> None:
    with RawPeer(agent.run_dir.agent_socket) as peer:
        with contextlib.suppress(ConnectionError):  # closed before all of it was sent
            peer.send(data)
        assert peer.closed_by_agent()
    assert agent.client.call(GetInfo()).pid == agent.process.pid


NO_MESSAGES = [
    pytest.param(struct.pack("<II", 0, 0), id="an empty message"),
    pytest.param(struct.pack("<II", 0, 3), id="parts that are not there"),
    pytest.param(struct.pack("<III", 4, 1, 1 << 31), id="a part longer than the message"),
    pytest.param(struct.pack("<II", MAX_MESSAGE + 1, 1), id="above the limit"),
    pytest.param(encode([b"add"]), id="add without a key"),
    pytest.param(encode([b"add", b"t-garbage", b"many"]), id="add of no number"),
    pytest.param(encode([b"compare_set", b"t-garbage"]), id="compare_set without values"),
    pytest.param(encode([b"append", b"t-garbage"]), id="append without a value"),
    pytest.param(encode([b"delete"]), id="delete without a key"),
    pytest.param(encode([b"wait", b"soon", b"t-never"]), id="wait for no number"),
    pytest.param(encode([b"set", b"t-garbage"]), id="set without a value"),
]


@pytest.mark.parametrize("data", NO_MESSAGES)
def test_invalid_store_message_closes_only_its_connection(agent: Served, data: bytes) -> None:
    with RawPeer(agent.run_dir.store_socket) as good, RawPeer(agent.run_dir.store_socket) as bad:
        assert good.ask_store(b"set", b"t-good", b"1") == [b""]
        bad.send(data)
        assert bad.closed_by_agent()
        assert good.ask_store(b"wait", b"1000", b"t-good") == [b"1"]


def test_random_bytes_close_only_their_connection(agent: Served) -> None:
    chance = random.Random(7)
    for path in (agent.run_dir.store_socket, agent.run_dir.agent_socket) * 20:
        with RawPeer(path) as peer:
            peer.send(chance.randbytes(chance.randrange(1, 400)))
    assert agent.client.call(GetInfo()).pid == agent.process.pid


def test_thousand_year_timeout_is_accepted(agent: Served) -> None:
    with RawPeer(agent.run_dir.store_socket) as peer:
        peer.send(encode([b"wait", b"31536000000000", b"t-thousand-years"]))
        assert agent.client.call(GetInfo()).pid == agent.process.pid
        with RawPeer(agent.run_dir.store_socket) as other:
            assert other.ask_store(b"set", b"t-thousand-years", b"over") == [b""]


def test_values_larger_than_the_socket_buffer_arrive_whole(agent: Served) -> None:
    with RawPeer(agent.run_dir.store_socket) as peer:
        for size in (1 << 10, 1 << 18, 1 << 23):
            value = random.Random(size).randbytes(size)
            assert peer.ask_store(b"set", b"t-large", value) == [b""]
            assert peer.ask_store(b"wait", b"1000", b"t-large") == [value]
        assert peer.ask_store(b"delete", b"t-large") == [b"1"]


def test_slow_reader_gets_its_replies(agent: Served) -> None:
    with RawPeer(agent.run_dir.agent_socket) as peer:
        number = 2000
        for identity in range(number):
            peer.send(json.dumps({"id": identity, "cmd": "get_info"}).encode() + b"\n")
        assert agent.client.call(GetInfo()).pid == agent.process.pid
        assert [peer.line()["id"] for _ in range(number)] == list(range(number))


def test_client_may_disconnect_while_waiting(agent: Served) -> None:
    with RawPeer(agent.run_dir.store_socket) as leaver:
        leaver.send(encode([b"wait", b"60000", b"t-left"]))
        assert leaver.ask_store(b"count")  # the wait has been taken in
    with RawPeer(agent.run_dir.store_socket) as other:
        assert other.ask_store(b"set", b"t-left", b"1") == [b""]
        assert other.ask_store(b"wait", b"1000", b"t-left") == [b"1"]


def test_agent_survives_descriptor_exhaustion(make_agent: MakeAgent) -> None:
    served = make_agent()
    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (32, 32))
    with contextlib.ExitStack() as peers:
        for _ in range(60):
            peers.enter_context(RawPeer(served.run_dir.store_socket))
        assert until(lambda: served.process.num_fds() >= 32)
        assert served.client.call(GetInfo()).pid == served.process.pid
    with RawPeer(served.run_dir.store_socket) as peer:
        assert peer.ask_store(b"count") == [b"0"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as somebody else")
def test_connection_of_another_user_is_closed_at_once(make_agent: MakeAgent) -> None:
    served = make_agent()
    sockets = [served.run_dir.agent_socket, served.run_dir.store_socket]
    assert [path.stat().st_mode & 0o777 for path in sockets] == [0o600, 0o600]
    for path in (*sockets, served.run_dir.path, served.run_dir.path.parent):
        path.chmod(0o777)
    _open_for_search(served.run_dir.path.parent.parent)
    script = (
        "import os, socket, sys\nos.setuid(65534)\n"
        "for path in sys.argv[1:]:\n    sock = socket.socket(socket.AF_UNIX)\n    sock.settimeout(60)\n"
        "    sock.connect(path)\n    print(sock.recv(1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, sockets)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["b''", "b''"], done.stderr
    assert served.client.call(GetInfo()).pid == served.process.pid


def _open_for_search(folder: Path) -> None:
    while folder != folder.parent and not folder.stat().st_mode & 0o001:
        folder.chmod(folder.stat().st_mode | 0o011)
        folder = folder.parent
