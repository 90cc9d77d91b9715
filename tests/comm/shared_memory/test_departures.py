"""A peer that does its part and then leaves or dies fails no wait, even of a rank that lost the processor meanwhile."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from axon_nb.comm.shared_memory.messages import Messages, Receive
from axon_nb.comm.shared_memory.segment.memory import Layout, SharedMemory
from axon_nb.comm.shared_memory.segment.pages import PeerLostError
from axon_nb.comm.shared_memory.segment.progress import SLICE_S, Progress
from axon_nb.comm.shared_memory.work import SharedWork

PEER = """
import ctypes, os, sys
from axon_nb.comm.shared_memory.messages import Messages
from axon_nb.comm.shared_memory.segment.memory import Layout, SharedMemory
from axon_nb.comm.shared_memory.segment.progress import Progress
from axon_nb.comm.shared_memory.work import SharedWork

descriptor = SharedMemory.open(sys.argv[1])
progress = Progress(SharedMemory(descriptor, Layout.of(2, 1 << 20)), 1, [0, 1], None)
sys.stdin.readline()
if sys.argv[2] == "post":
    progress.post(5)
elif sys.argv[2] == "send":
    value = ctypes.c_uint64(42)
    messages = Messages(progress, "peer", 60.0, lambda error: None)
    messages.send(SharedWork([]), ctypes.addressof(value), 8, dtype=1, peer=0, tag=0, line=0)
os._exit(0)
"""


@contextmanager
def rank_0(does: str) -> Iterator[Progress]:
    """Yield rank 0, whose peer does something and dies during rank 0's first check of a wait."""
    layout = Layout.of(2, 1 << 20)
    descriptor = SharedMemory.create(layout)
    command = [sys.executable, "-c", PEER, SharedMemory.address_of(descriptor), does]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as peer:
        waits = False

        def give_up() -> None:
            if waits and peer.poll() is None:
                peer.communicate(b"\n", timeout=60)
                time.sleep(2 * SLICE_S)

        progress = Progress(SharedMemory(descriptor, layout), 0, [0, 1], give_up)
        progress.wait_until_ready(time.monotonic() + 60)
        waits = True
        os.close(descriptor)
        yield progress


def wait_for_step(progress: Progress) -> int:
    progress.wait_for(1, 5, time.monotonic() + 60)
    return 42


def wait_for_message(progress: Progress) -> int:
    messages, work, value = Messages(progress, "test", 60.0, lambda _: None), SharedWork([]), ctypes.c_uint64()
    messages.receive(Receive(work, ctypes.addressof(value), 8, 1, 1, 0, None))
    messages.drive(work, time.monotonic() + 60)
    return value.value


def leave_message_to_helper(progress: Progress) -> int:
    messages, work, value = Messages(progress, "test", 60.0, lambda _: None), SharedWork([]), ctypes.c_uint64()
    messages.receive(Receive(work, ctypes.addressof(value), 8, 1, 1, 0, None))
    messages.attend()
    work.wait()
    messages.close()
    return value.value


WAITS: dict[str, tuple[str, Callable[[Progress], int]]] = {
    "collective": ("post", wait_for_step),
    "message": ("send", wait_for_message),
    "message that no thread waits for": ("send", leave_message_to_helper),
}


@pytest.mark.parametrize("what", WAITS)
def test_work_of_a_peer_before_its_death_counts(what: str) -> None:
    does, wait = WAITS[what]
    with rank_0(does) as progress:
        assert wait(progress) == 42


@pytest.mark.parametrize("what", WAITS)
def test_peer_that_dies_too_early_is_reported(what: str) -> None:
    _, wait = WAITS[what]
    with rank_0("nothing") as progress, pytest.raises(PeerLostError, match="rank 1 died while this rank waited for it"):
        wait(progress)
