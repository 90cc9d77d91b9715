"""Waits over shared memory end: at aborts, interrupts, deaths and limits, at once on all ranks, and leave nothing."""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb.comm import World
from axon_nb.comm.errors import CollectiveMismatchError, CommError, InvalidArgumentError
from axon_nb.comm.shared_memory import group, messages, work
from axon_nb.comm.shared_memory.collectives import rounds
from axon_nb.comm.shared_memory.segment import memory, progress
from axon_nb.comm.shared_memory.segment.progress import form, open_bytes
from tests.support.ranks import RankWorld

SOON_S = 5.0
"""A wait ends within 50 ms; the machine may be busy."""

LIMIT_S = 60
"""Timeout of the groups: only a wait that nothing ends takes so long."""
_FILES = {module.__file__ for module in (group, messages, work, work, rounds, progress, memory)}


def caught(call: Any, *args: Any, **kwargs: Any) -> str:
    """What a call that must fail says."""
    try:
        call(*args, **kwargs)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


CALLS: dict[str, Any] = {
    "other operations": lambda rank, group: (
        dist.broadcast(torch.ones(4), 0, group=group) if rank == 1 else dist.all_reduce(torch.ones(4), group=group)
    ),
    "other sizes": lambda rank, group: dist.all_reduce(torch.ones(8 if rank == 2 else 4), group=group),
    "large and small": lambda rank, group: dist.all_reduce(torch.ones(5_000_000 if rank == 2 else 4), group=group),
    "other dtypes": lambda rank, group: dist.all_reduce(
        torch.ones(4, dtype=(torch.int32, torch.int64)[rank == 1]), group=group
    ),
    "other roots": lambda rank, group: dist.broadcast(torch.ones(4), 3 if rank == 3 else 0, group=group),
    "other reduce operations": lambda rank, group: dist.all_reduce(
        torch.ones(4), dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM, group=group
    ),
}
WORDS = {
    "other operations": ["rank 1 is in broadcast", "are in all_reduce", "Collective mismatch: "],
    "other sizes": ["ranks 0-1,3 passed 4 float32", "rank 2 passed 8 float32"],
    "large and small": ["ranks 0-1,3 passed 4 float32", "rank 2 passed 5,000,000 float32"],
    "other dtypes": ["rank 1 passed 4 int64", "ranks 0,2-3 passed 4 int32"],
    "other roots": ["rank 3 passed 4 float32 with root rank 3", "ranks 0-2 passed 4 float32 with root rank 0"],
    "other reduce operations": ["rank 0 passed 4 float32 with MAX", "ranks 1-3 passed 4 float32 with SUM"],
}


@pytest.mark.parametrize("name", CALLS)
def test_mismatched_calls_raise_one_sentence_on_all_ranks(shm_world: Any, name: str) -> None:
    def work(world: World) -> str:
        with pytest.raises(CollectiveMismatchError) as found:
            CALLS[name](world.rank(), None)
        dist.all_reduce(tensor := torch.tensor([world.rank()]))
        assert tensor.item() == 6
        return str(found.value)

    sentences = shm_world.run(work)
    assert all(" at line " in text for text in sentences)
    # A rank waits a moment for the calls of the others; who comes last reads them all.
    assert any(all(words in text for words in WORDS[name]) for text in sentences), sentences


def test_abort_ends_all_waits_on_all_ranks(shm_world: Any) -> None:
    def work(world: World) -> Any:
        rank = world.rank()
        group = dist.new_group(backend="shm")
        started = time.monotonic()
        if rank == 0:
            time.sleep(0.3)
            group.abort()
            sentence = caught(dist.barrier, group)
        elif rank == 1:
            sentence = caught(dist.all_reduce, torch.ones(4_000_000), group=group)
        elif rank == 2:
            sentence = caught(dist.all_reduce(torch.ones(4_000_000), group=group, async_op=True).wait)
        else:
            sentence = caught(dist.recv, torch.ones(4), 1, group=group)
        assert time.monotonic() - started < SOON_S
        again = caught(dist.all_reduce, torch.ones(1), group=group)
        dist.destroy_process_group(group)
        dist.barrier()
        return sentence, again

    for sentence, again in shm_world.run(work):
        assert sentence.startswith("GroupLeftError: ")
        assert again.startswith("GroupLeftError: ")


def test_abort_completes_futures(shm_world: Any) -> None:
    def work(world: World) -> str:
        group = dist.new_group(backend="shm")
        if world.rank() == 0:
            time.sleep(0.2)
            group.abort()
            sentence = "GroupLeftError"
        else:
            future = dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future()
            sentence = caught(future.wait)
        dist.barrier()
        return sentence

    assert all("GroupLeft" in sentence or "left the group" in sentence for sentence in shm_world.run(work))


def test_timeout_ends_the_wait_on_all_ranks(shm_world: Any) -> None:
    def work(world: World) -> str:
        group = dist.new_group(backend="shm", timeout=timedelta(seconds=1))
        sentence = ""
        if world.rank() != 3:
            sentence = caught(dist.all_reduce, torch.ones(3), group=group)
        dist.barrier()
        return sentence

    sentences = shm_world.run(work)
    assert any("timed out while waiting for rank 3" in sentence for sentence in sentences)
    assert sentences[3] == ""


def test_monitored_barrier_names_missing_ranks(shm_world: Any) -> None:
    def work(world: World) -> str:
        group = dist.new_group(backend="shm")
        dist.barrier()
        sentence = ""
        if world.rank() in (0, 2):
            sentence = caught(group.monitored_barrier, timedelta(seconds=1))
        dist.barrier()
        return sentence

    sentences = shm_world.run(work)
    assert any("ranks 1,3 did not arrive" in sentence for sentence in sentences), sentences


def test_interrupt_ends_a_wait(shm_world: Any, tmp_path: Path) -> None:
    def work(world: World, flag: Path) -> float:
        group: Any = dist.new_group(backend="shm")
        waited = 0.0
        if world.rank() == 0:
            sent = []

            def interrupt() -> None:
                while "waits for rank" not in group.describe()[0]:
                    time.sleep(0.01)
                sent.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(4), group=group)
            waited = time.monotonic() - sent[0]
            flag.touch()
        else:
            while not flag.exists():
                time.sleep(0.01)
            assert "left the group" in caught(dist.all_reduce, torch.ones(4), group=group)
        dist.barrier()
        return waited

    assert max(shm_world.run(work, tmp_path / "interrupted")) < SOON_S


def test_waiting_uses_no_cpu_time(shm_world: Any) -> None:
    def work(world: World) -> float:
        """CPU seconds per second that this rank waits."""
        dist.barrier()
        began, cpu = time.monotonic(), time.process_time()
        if world.rank() == 0:
            time.sleep(2)
        dist.all_reduce(torch.ones(4))
        return (time.process_time() - cpu) / (time.monotonic() - began)

    assert max(shm_world.run(work)) < 0.05


def test_failures_leak_no_threads_descriptors_or_memory(shm_world: Any) -> None:
    def work(world: World) -> Any:
        def counts() -> tuple[int, int, int]:
            gc.collect()
            maps = Path("/proc/self/maps").read_text().count("memfd:axon_nb")
            return threading.active_count(), len(os.listdir("/proc/self/fd")), maps

        def fail_once() -> None:
            group = dist.new_group(backend="shm")
            handle = dist.all_reduce(torch.ones(4), group=group, async_op=True) if world.rank() else None
            if world.rank() == 0:
                group.abort()
            else:
                assert handle is not None
                caught(handle.wait)
            dist.destroy_process_group(group)
            dist.barrier()

        for _ in range(3):
            fail_once()
        before = counts()
        for _ in range(30):
            fail_once()
        return before, counts()

    for before, after in shm_world.run(work):
        assert all(now <= then + 1 for then, now in zip(before, after, strict=True)), (before, after)


def test_death_ends_waits_for_the_dead_rank() -> None:
    def work(world: World) -> Any:
        if world.rank() == 2:
            dist.recv(torch.ones(1), 0)
            os._exit(1)
        pair = dist.new_group([0, 1], use_local_synchronization=True)
        if world.rank() == 0:
            dist.send(torch.ones(1), 2)
        started = time.monotonic()
        sentence = caught(dist.all_reduce, torch.ones(4))
        waited = time.monotonic() - started
        dist.all_reduce(tensor := torch.ones(1), group=pair)
        return sentence, waited, tensor.item()

    with RankWorld(3, backend="shm") as world:
        world.begin(work)
        answers = [world.answer(rank) for rank in (0, 1)]
    assert any("rank 2 died" in sentence for sentence, _, _ in answers)
    assert all(waited < SOON_S and total == 2 for _, waited, total in answers)


def test_current_calls_are_readable_while_a_rank_is_stopped() -> None:
    def work(world: World) -> Any:
        dist.barrier()
        if world.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        handle = dist.all_reduce(torch.ones(4), async_op=True)
        lines = []
        if world.rank() == 0:
            limit = time.monotonic() + 60
            while not any("waits for rank 1" in line for line in lines) and time.monotonic() < limit:
                time.sleep(0.05)
                lines = dist.group.WORLD.describe()
        pids: list[Any] = [None, None]
        if world.rank() == 0:
            os.kill(dist.group.WORLD._progress.words[dist.group.WORLD._progress.places[1] + 9], signal.SIGCONT)
        handle.wait()
        dist.all_gather_object(pids, os.getpid())
        return lines

    with RankWorld(2, backend="shm") as world:
        lines = world.run(work)[0]
    assert "all_reduce(SUM) of 4 float32 at line" in lines[0]
    assert "waits for rank 1" in lines[0]
    assert "barrier" in lines[1]


def test_memory_limit_too_small_for_the_group_is_rejected() -> None:
    with pytest.raises(InvalidArgumentError, match=r"A group of 8 ranks needs at least 1472 KiB of shared memory, but"):
        form(dist.HashStore(), rank=0, members=list(range(8)), key="memory", timeout_s=1.0, max_bytes=1 << 20)


def test_limit_bounds_the_memory_of_all_groups() -> None:
    def work(world: World) -> list[Any]:
        # On Gloo, the groups of this test are the only ones over shared memory.
        limit, store, members = 4 << 20, dist.distributed_c10d._get_default_store(), [0, 1]
        groups: list[Any] = []
        for number in range(40):
            try:
                key = f"bounded-{number}"
                groups.append(form(store, rank=world.rank(), members=members, key=key, timeout_s=30, max_bytes=limit))
            except CommError as error:
                return [open_bytes(), limit, str(error), [group.memory.layout for group in groups]]
        raise AssertionError("40 groups of at least 128 KiB fit into 4 MiB")

    with RankWorld(2, backend="gloo") as world:
        first, second = world.run(work)
    assert first == second  # also the layouts: the first rank decides
    total, limit, sentence, layouts = first
    assert limit - 256 * 1024 < total <= limit
    assert re.search(r"but group_memory is 4 MiB, of which other groups take \d+ [KM]iB: raise it", sentence)
    assert layouts[0].total > 4 * layouts[-1].total


class Interrupt:
    """Interrupts this thread within a `with` block, when it comes to the n-th line of the modules."""

    def __init__(self, number: int) -> None:
        self._left = number

    @property
    def has_struck(self) -> bool:
        return self._left == 0

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in _FILES or self.has_struck:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith("with "):  # Python never interrupts the release of a lock
            self._left -= 1
            if self.has_struck:
                raise KeyboardInterrupt
        return self._trace


class Calls:
    """The calls of two ranks on one group; call `i` passes `i + 1`."""

    def __init__(self, rank: int, group: Any) -> None:
        self.rank, self.group = rank, group

    def small_sum(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor[:3], group=self.group)

    def queued_sum(self, tensor: torch.Tensor) -> None:
        handle: Any = dist.all_reduce(tensor[:50_000], group=self.group, async_op=True)
        handle.wait()

    def received(self, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            dist.recv(tensor.zero_(), 1, group=self.group)
        else:
            dist.send(tensor, 0, group=self.group)

    def sent(self, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            dist.send(tensor, 1, group=self.group)
        else:
            dist.recv(tensor.zero_(), 0, group=self.group)


def _possible(name: str, rank: int, number: int) -> set[float]:
    """What call `number` can find on a rank, whether or not rank 0 made its first call in vain."""
    own = number + 1.0
    others = {own, own - 1 if rank == 0 else own + 1} - {0.0}
    if name.endswith("sum"):
        return {own + other for other in others}
    return others if (name, rank) in (("received", 0), ("sent", 1)) else {own}


@pytest.mark.timeout(600)
def test_caught_interrupt_is_harmless_or_raises_on_all_ranks() -> None:
    def work(world: World, name: str) -> int:
        """Return the number of lines at which rank 0 was interrupted."""
        rank, call_name = world.rank(), name
        for number in itertools.count(1):
            shm: Any = dist.new_group(backend="shm", timeout=timedelta(seconds=LIMIT_S))
            call = getattr(Calls(rank, shm), call_name)
            began = time.monotonic()
            struck = 0
            tensors = [torch.full((200_000,), float(i + 1)) for i in range(3)]
            found: list[set[float] | str] = []
            for i, tensor in enumerate(tensors):
                try:
                    if rank == 0 and i == 0:
                        with Interrupt(number) as interrupt:
                            call(tensor)
                        assert not interrupt.has_struck
                    else:
                        call(tensor)
                    part = tensor[:3] if call_name.endswith("sum") else tensor
                    found.append(set(part.tolist()))
                except KeyboardInterrupt:
                    struck = 1
                    found.append("interrupted")
                except RuntimeError as error:
                    found.append(str(error))
            if rank == 0:
                dist.destroy_process_group(shm)  # ends a wait of rank 1 for a call that was made in vain
            context = f"{call_name} interrupted at line {number}, rank {rank}: {found}"
            assert time.monotonic() - began < LIMIT_S / 2, context
            values = [one for one in found if isinstance(one, set)]
            for i, one in enumerate(found):
                assert isinstance(one, str) or one <= _possible(call_name, rank, i), context
            assert all(min(now) > min(then) for then, now in itertools.pairwise(values)), context
            assert call_name != "received" or rank or set(tensors[0].tolist()) <= {0.0, 1.0}, context
            dist.barrier()
            if rank == 1:
                dist.destroy_process_group(shm)
            dist.all_reduce(more := torch.tensor(struck))
            if not more:
                return number - 1
        raise AssertionError

    with RankWorld(2, backend="shm") as world:
        for name in ("small_sum", "queued_sum", "received", "sent"):
            assert min(world.run(work, name)) > 50
