"""Only private Unix sockets listen, and nobody else can read the cluster's files or its output."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint, listening, modes


def test_no_process_listens_on_a_port(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nt_group = dist.new_group([0, 1, 2, 3])\ndist.all_reduce(torch.ones(1), group=t_group)")
    assert listening(footprint(kernel)) == []


def test_cluster_files_are_owner_only(kernel: Kernel) -> None:
    folder = footprint(kernel).folder
    assert stat.S_IMODE(os.lstat(folder).st_mode) == 0o700
    readable = {name: oct(mode) for name, mode in modes(folder).items() if mode & 0o077}
    assert readable == {}
    assert any(name.endswith(".log") for name in modes(folder))
    assert any("ipcontroller-client.json" in name for name in modes(folder))


def test_keys_are_not_in_the_environment_of_ranks(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed --ranks 0\nimport os\n[n for n in os.environ if n.startswith('IPP_')]")
    assert reply.lines() == ["[rank 0] []"]


def _answer(path: Path, user: int) -> bytes:
    """What a process of this user gets when it connects to a Unix socket."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(user)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
            os.write(writer, b"connected")
        except OSError as error:
            os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, "rb") as answer:
        return answer.read()


def test_no_socket_accepts_another_user(kernel: Kernel) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    folder = footprint(kernel).folder
    sockets = [path for path in folder.rglob("*") if stat.S_ISSOCK(os.lstat(path).st_mode)]
    iopub = json.loads((folder / "profile" / "security" / "ipcontroller-client.json").read_text())["iopub"]
    assert {folder / "agent.sock", folder / "channels" / f"c-{iopub}"} <= set(sockets)
    assert {_answer(path, 65534) for path in sockets} == {b"PermissionError"}
    assert _answer(folder / "channels" / f"c-{iopub}", os.getuid()) == b"connected"


def test_files_written_by_ranks_follow_the_users_umask(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0\nimport os, tempfile\n"
        "p = os.path.join(tempfile.mkdtemp(), 'f'); open(p, 'w').close(); oct(os.stat(p).st_mode & 0o777)"
    )
    mask = os.umask(0)
    os.umask(mask)
    assert reply.lines() == [f"[rank 0] '{oct(0o666 & ~mask)}'"]
