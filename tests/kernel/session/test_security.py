"""Only loopback and Unix sockets listen, and nobody else can read the cluster's files."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint, listening, modes


def test_every_listener_is_on_loopback(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nt_group = dist.new_group([0, 1, 2, 3])\ndist.all_reduce(torch.ones(1), group=t_group)")
    sockets = listening(footprint(kernel))
    assert sockets, "the controller listens somewhere"
    assert {entry.laddr.ip for entry in sockets} == {"127.0.0.1"}


def test_files_are_for_their_owner_alone(kernel: Kernel) -> None:
    folder = footprint(kernel).folder
    assert stat.S_IMODE(os.lstat(folder).st_mode) == 0o700
    readable = {name: oct(mode) for name, mode in modes(folder).items() if mode & 0o077}
    assert readable == {}
    assert any(name.endswith(".log") for name in modes(folder))
    assert any("ipcontroller-client.json" in name for name in modes(folder))


def test_keys_are_not_in_the_environment_of_ranks(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed --ranks 0\nimport os\n[n for n in os.environ if n.startswith('IPP_')]")
    assert reply.lines() == ["[rank 0] []"]


def test_another_users_connection_is_refused(kernel: Kernel) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    path = footprint(kernel).folder / "agent.sock"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
            os.write(writer, b"connected")
        except PermissionError:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"refused"


def test_files_that_ranks_write_have_the_users_own_mode(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0\nimport os, tempfile\n"
        "p = os.path.join(tempfile.mkdtemp(), 'f'); open(p, 'w').close(); oct(os.stat(p).st_mode & 0o777)"
    )
    mask = os.umask(0)
    os.umask(mask)
    assert reply.lines() == [f"[rank 0] '{oct(0o666 & ~mask)}'"]
