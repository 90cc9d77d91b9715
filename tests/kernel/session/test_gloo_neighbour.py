"""Another user of this host connects to the ranks' Gloo ports, which have no authentication."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint, listening

NEIGHBOUR = """
import encodings.idna, os, socket, struct, sys
os.setuid(12345)
held = []
for port in map(int, sys.argv[1:]):
    for number in range(40):  # of connections that are to come: the listener keeps them until then
        held.append(socket.create_connection(("127.0.0.1", port)))
        held[-1].sendall(struct.pack("=q", number))
print("connected", flush=True)
sys.stdin.read()
"""
SUM = "t = torch.full((4,), rank + 1.0)\ndist.all_reduce(t, group=t_group)\nt.tolist()"


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A kernel with 2 ranks on Gloo."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    with Kernel(env={"AXON_NB_CPU_BACKEND": "gloo"}) as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        yield kernel


def test_groups_reject_connections_of_another_user(kernel: Kernel) -> None:
    cluster = footprint(kernel)
    processes = [process for process in cluster.processes if process.pid in cluster.ranks]
    ports = {str(entry.laddr.port) for entry in listening(dataclasses.replace(cluster, processes=tuple(processes)))}
    assert ports
    command = [sys.executable, "-c", NEIGHBOUR, *sorted(ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "connected\n"
        reply = kernel.run("%%distributed\nt_group = dist.new_group([0, 1])")
        assert "connections to this rank are from user 12345" in reply.traceback
        kernel.ok(f"%%distributed\nt_group = dist.new_group([0, 1])\n{SUM}")
        assert kernel.ok(f"%%distributed\n{SUM}").lines() == ["[ranks 0-1] [3.0, 3.0, 3.0, 3.0]"]
        neighbour.communicate()
