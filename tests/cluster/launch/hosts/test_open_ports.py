"""What listens while ranks are on two hosts: on the named interface only, and unharmed by whoever has no key.

Random bytes go to the ports of the agent, also behind the greeting of ZeroMQ as messages that are not signed. Those of
the controller are left out: what strangers send there can make it lose a message (docs/design/security.md).
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.cluster.launch.second_host import HERE, start_with_joined_host
from tests.support.script import Script

_ADDRESS = "127.0.0.1"
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_SOCKET_TYPES = (b"DEALER", b"ROUTER", b"REQ", b"SUB", b"XPUB", b"PUB")
_MAX_GROWTH = 64 << 20
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
        connections = psutil.Process(process.pid).net_connections("tcp")
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


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def _messages(generator: random.Random, size: int) -> bytes:
    """ZeroMQ's greeting and handshake, then about `size` bytes of messages."""
    kind = generator.choice(_SOCKET_TYPES)
    data = _GREETING + _frame(b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind, 4)
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
def test_bytes_of_strangers_at_the_ports_of_the_agent_do_no_harm(script: Script, size: int) -> None:
    key = script.value("c.connection.client.session.key.decode()").encode()
    agent = script.value("c.connection.agent.hello_reply.pid")
    generator, ports = random.Random(11), _listening(script)
    before = {port.process: (port.process.memory_info().rss, port.process.num_fds()) for port in ports}
    for address in dict.fromkeys(port.address for port in ports if port.process.pid == agent):
        sent = 0
        while sent < size:
            length = min(size, generator.choice([1, 63, 64, 65, 4096, 65536]))
            data = generator.randbytes(length) if generator.random() < 0.5 else _messages(generator, length)
            answer = _send(address, data)
            assert key not in answer
            assert b"kept" not in answer
            sent += len(data)
    assert [one.address for one in _listening(script)] == [one.address for one in ports]
    cell = "t = torch.ones(1); dist.all_reduce(t); (kept, t.item())"
    assert script.value(f"dict(c.run({cell!r}).values)") == {rank: (rank, 4.0) for rank in range(4)}
    for process, (memory, files) in before.items():
        assert process.memory_info().rss - memory < _MAX_GROWTH, process.cmdline()
        assert process.num_fds() - files < 64 + 8, process.cmdline()  # what has not authenticated is kept for a while
