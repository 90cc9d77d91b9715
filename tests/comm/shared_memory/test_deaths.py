"""Deaths and departures are noticed by all who need the rank, and by nobody else; so is memory that it cannot get."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from axon_nb.comm import World
from axon_nb.comm.errors import CommError
from axon_nb.comm.shared_memory.messages import Messages, Receive
from axon_nb.comm.shared_memory.segment.memory import Layout, SharedMemory
from axon_nb.comm.shared_memory.segment.pages import PeerLostError
from axon_nb.comm.shared_memory.segment.progress import SLICE_S, Progress
from axon_nb.comm.shared_memory.work import SharedWork
from tests.support.processes import until
from tests.support.ranks import RankWorld

SOON_S = 30.0
"""Far less than the timeout of the group."""

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


def failure(call: Callable[[], Any]) -> str:
    """What a call says that must fail."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def test_death_ends_waits_for_other_ranks(tmp_path: Path) -> None:
    def work(world: World, folder: Path) -> Any:
        rank = world.rank()
        collective: Any
        collective, message, threads = (dist.new_group(backend="shm") for _ in range(3))
        if rank == 2:
            until(lambda: len(list(folder.glob("waits*"))) == 2)
            os._exit(1)
        found = []
        if rank == 1:  # late in all groups: rank 2 must not be noticed because it is rank 1's turn
            until(lambda: len(list(folder.glob("noticed*"))) == 2)
        elif rank == 0:
            both: list[str] = []
            helper = dist.all_reduce(torch.ones(1), group=threads, async_op=True)
            thread = threading.Thread(target=lambda: both.append(failure(helper.wait)))
            thread.start()
            (folder / "waits0").touch()
            both.append(failure(lambda: dist.recv(torch.ones(1), 2, group=threads)))
            thread.join()
            found += [failure(lambda: dist.recv(torch.ones(1), 1, group=message)), *both]
            (folder / "noticed0").touch()
        else:
            thread = threading.Thread(target=lambda: until(lambda: "waits for" in collective.describe()[3]))
            thread.start()
            threading.Thread(target=lambda: (thread.join(), (folder / "waits3").touch())).start()
            found.append(failure(lambda: dist.all_reduce(torch.ones(4), group=collective)))
            (folder / "noticed3").touch()
        return found

    with RankWorld(4, backend="shm") as world:
        world.begin(work, tmp_path)
        found = {rank: world.answer(rank) for rank in (0, 1, 3)}
    assert found[1] == []
    assert len(found[0]) == 3
    assert all("rank 2 died" in sentence for sentence in (*found[0], *found[3])), found


def test_early_exit_of_a_rank_affects_nobody(tmp_path: Path) -> None:
    def work(world: World, folder: Path) -> Any:
        group: Any = dist.group.WORLD
        rank = world.rank()
        dist.all_reduce(torch.ones(4))
        if rank == 2:
            dist.send(torch.ones(1), 0)
            raise SystemExit
        until(lambda: group.progress.words[group.progress.places[2] + 8])
        assert rank or until(lambda: not group.progress.is_alive(2))
        if rank == 1:
            until((folder / "waits").exists)
            time.sleep(0.3)  # several checks
            dist.send(torch.full((1,), 5.0), 0)
            return []
        dist.recv(first := torch.zeros(1), 2)
        (folder / "waits").touch()
        dist.recv(second := torch.zeros(1), 1)
        return first.item(), second.item(), failure(lambda: dist.recv(torch.zeros(1), 2))

    with RankWorld(3, backend="shm") as world:
        world.begin(work, tmp_path)
        assert world.answer(1) == []
        first, second, sentence = world.answer(0)
    assert (first, second) == (1.0, 5.0)
    assert sentence == "rank 2 has ended"


def test_recv_from_any_source_continues_while_a_sender_lives(tmp_path: Path) -> None:
    def work(world: World, folder: Path) -> Any:
        rank = world.rank()
        group: Any = dist.new_group(backend="shm")
        if rank == 3:
            until((folder / "waits").exists)
            os._exit(1)
        if rank == 2:
            until((folder / "waits").exists)
            dist.destroy_process_group(group)
            return None
        if rank == 1:
            until((folder / "waits").exists)
            assert until(lambda: not group.progress.is_alive(3))
            assert until(lambda: group.progress.words[group.progress.places[2] + 8])
            time.sleep(0.3)  # several checks
            dist.send(torch.full((1,), 5.0), 0, group=group)
            dist.destroy_process_group(group)
            return None
        handle: Any = dist.irecv(tensor := torch.zeros(1), group=group)
        (folder / "waits").touch()
        handle.wait()
        return tensor.item(), handle.source_rank(), failure(lambda: dist.recv(torch.zeros(1), group=group))

    with RankWorld(4, backend="shm") as world:
        world.begin(work, tmp_path)
        assert world.answer(0) == (5.0, 1, "every other rank died or destroyed the group")


@contextmanager
def limited(kind: int, size: int) -> Iterator[None]:
    """Limit a resource of this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def file_limit() -> tuple[int, int]:
    return resource.RLIMIT_FSIZE, 1 << 20


def address_limit() -> tuple[int, int]:
    """What this process has mapped, and less than a group needs."""
    return resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (16 << 20))


FAILURES: dict[str, tuple[int, Callable[[], tuple[int, int]], str]] = {
    "create": (0, file_limit, "Rank 0 cannot create "),
    "map": (2, address_limit, "Rank 2 cannot map "),
}


@pytest.mark.parametrize("name", FAILURES)
def test_rank_without_memory_reports_cause_to_all_ranks(shm_world: Any, name: str) -> None:
    failing, limit, text = FAILURES[name]

    def work(world: World) -> str:
        began = time.monotonic()
        with limited(*limit()) if world.rank() == failing else nullcontext(), pytest.raises(CommError) as found:
            dist.new_group(backend="shm")
        assert time.monotonic() - began < SOON_S
        dist.all_reduce(total := torch.ones(1), group=(group := dist.new_group(backend="shm")))
        dist.destroy_process_group(group)
        assert total.item() == 4
        return str(found.value)

    sentences = shm_world.run(work)
    assert len(set(sentences)) == 1
    assert text in sentences[0]
    assert {"create": "(File too large)", "map": "(Cannot allocate memory)"}[name] in sentences[0]


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
