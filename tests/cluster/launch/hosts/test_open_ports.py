"""What listens while ranks are on two hosts: on the named interface only, and unharmed by whoever has no key.

Random bytes go to the ports of the agent and of the controller, also behind the greetings of three versions of ZeroMQ's
protocol, as messages that are neither encrypted nor signed and as handshakes of CURVE. Meanwhile cells run.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import zmq

from axon_nb.cluster.launch import compatibility
from axon_nb.cluster.launch.launchers import controller_command
from axon_nb.host.run_dir import RunDir
from tests.cluster.launch.second_host import HERE, start_with_joined_host
from tests.support.processes import until
from tests.support.script import Script

_ADDRESS = "127.0.0.1"
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE = _SIGNATURE + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
_HELLO = b"\x05HELLO\x01\x00" + bytes(72)
_SOCKET_TYPES = (b"DEALER", b"ROUTER", b"REQ", b"SUB", b"XPUB", b"PUB")
_MAX_GROWTH = 64 << 20
_CELLS_UNTIL = """
import pathlib
got = "as sent"
while not pathlib.Path({done!r}).exists():
    if dict(c.run("rank * 2").values) != {{rank: rank * 2 for rank in range(4)}}:
        got = "something else"
got
"""
_WORDS = (
    b"",
    b"<IDS|MSG>",
    b"{}",
    b'{"msg_type": "execute_request", "msg_id": "1"}',
    b'{"engine_id": 0}',
    b"\x01",
    b"[]",
)


@dataclass(frozen=True)
class Port:
    """A TCP port on which a process listens."""

    process: psutil.Process
    address: tuple[str, int]


def _listening(script: Script) -> list[Port]:
    found = []
    for process in [script.process, *script.others()]:
        try:
            connections = psutil.Process(process.pid).net_connections("tcp")
        except psutil.NoSuchProcess:  # it has just ended
            continue
        listening = [one for one in connections if one.status == psutil.CONN_LISTEN]
        found += [Port(psutil.Process(process.pid), (one.laddr.ip, one.laddr.port)) for one in listening]
    return found


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with ranks 0 and 1 here, 2 and 3 under the agent that joined."""
    with Script(tmp_path_factory.mktemp("ports")) as script:
        script.ok(start_with_joined_host(HERE, "lo"), timeout=230)
        script.ok("c.run('kept = rank; dist.barrier()')")
        yield script


def test_nothing_listens_on_an_interface_that_was_not_named(script: Script) -> None:
    ports = _listening(script)
    assert len(ports) > 10  # agent, store, controller
    assert {port.address[0] for port in ports} == {_ADDRESS}


def test_pyzmq_without_curve_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compatibility.unencrypted()
    assert "--IPController.enable_curve=True" in controller_command(RunDir(Path()), ip=_ADDRESS)
    monkeypatch.setattr(zmq, "has", lambda name: False)
    assert "Run `pip install --force-reinstall pyzmq`" in compatibility.unencrypted()
    assert "--IPController.enable_curve=False" in controller_command(RunDir(Path()), ip=_ADDRESS)


def _is_controller(process: psutil.Process) -> bool:
    return any(word.startswith("from axon_nb.host.children import run_controller") for word in process.cmdline())


def test_who_has_no_key_reads_nothing_that_cells_print(script: Script) -> None:
    facts = json.loads(Path(script.value("str(c.connection.run_dir.client_file)")).read_text())
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        subscribers = [stack.enter_context(context.socket(zmq.SUB)) for _ in range(3)]
        for one, server_key in zip(subscribers, (None, zmq.curve_keypair()[0], facts["curve_serverkey"]), strict=True):
            if server_key is not None:
                one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
                one.curve_serverkey = server_key if isinstance(server_key, bytes) else server_key.encode()
            one.setsockopt(zmq.SUBSCRIBE, b"")
            one.connect(f"{facts['interface']}:{facts['iopub']}")

        def hears_a_cell(one: zmq.Socket[bytes]) -> int:
            script.ok("c.run('print(1)')")
            return one.poll(200)

        assert until(lambda: hears_a_cell(subscribers[2])), "it has the key"
        assert [one.poll(0) for one in subscribers[:2]] == [0, 0]


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def _messages(generator: random.Random, size: int) -> bytes:
    """A greeting of some version of ZeroMQ's protocol and its handshake, then about `size` bytes of messages."""
    kind = generator.choice(_SOCKET_TYPES)
    handshakes = (
        _GREETING + _frame(b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind, 4),
        _CURVE + _frame(_HELLO + generator.randbytes(120), 4),
        _CURVE + _frame(b"\x08INITIATE" + generator.randbytes(248), 4),
        _SIGNATURE + bytes([1, generator.randrange(12), 0, 0]),  # version 2
        b"\x01\x00",  # version 1: an anonymous peer
    )
    data = generator.choice(handshakes)
    while len(data) < size:
        words = (*_WORDS, generator.randbytes(20), generator.randbytes(300))
        parts = generator.choices(words, k=generator.randint(1, 9))
        data += b"".join(_frame(part, number < len(parts) - 1) for number, part in enumerate(parts))
    return data


def _send(address: tuple[str, int], data: bytes) -> bytes:
    """Send bytes; return what came back until the other end closed, or was silent."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(address, 20) as sock:
        sock.settimeout(0.05)
        with contextlib.suppress(OSError):
            sock.sendall(data)
        while chunk := sock.recv(4096):
            answer += chunk
    return answer


@pytest.mark.parametrize("size", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_bytes_of_strangers_at_the_ports_of_agent_and_controller_do_no_harm(
    script: Script, size: int, tmp_path: Path
) -> None:
    key = script.value("c.connection.client.session.key.decode()").encode()
    assert key
    agent = script.value("c.connection.agent.hello_reply.pid")
    generator, ports = random.Random(11), _listening(script)
    before = {port.process: (port.process.memory_info().rss, port.process.num_fds()) for port in ports}
    tried = {port.address for port in ports if port.process.pid == agent or _is_controller(port.process)}
    assert len(tried) > 10
    script.submit(_CELLS_UNTIL.format(done=str(tmp_path / "done")))
    for address in sorted(tried):
        sent = 0
        while sent < size:
            length = min(size, generator.choice([1, 63, 64, 65, 4096, 65536]))
            data = generator.randbytes(length) if generator.random() < 0.5 else _messages(generator, length)
            answer = _send(address, data)
            assert key not in answer
            assert b"kept" not in answer
            sent += len(data)
    (tmp_path / "done").touch()
    cells = script.collect()
    assert cells.value == "as sent", cells
    assert [one.address for one in _listening(script)] == [one.address for one in ports]
    cell = "t = torch.ones(1); dist.all_reduce(t); (kept, t.item())"
    assert script.value(f"dict(c.run({cell!r}).values)") == {rank: (rank, 4.0) for rank in range(4)}
    for process, (memory, files) in before.items():
        assert process.memory_info().rss - memory < _MAX_GROWTH, process.cmdline()
        assert process.num_fds() - files < 64 + 8, process.cmdline()  # what has not authenticated is kept for a while
