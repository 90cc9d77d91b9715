"""An interrupt that the program catches, at any line: the group works on, or all its ranks get an error, at once."""

from __future__ import annotations

import itertools
import linecache
import sys
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb.comm import World
from axon_nb.comm.shared_memory import group, messages, work
from axon_nb.comm.shared_memory.collectives import rounds
from axon_nb.comm.shared_memory.segment import memory, progress
from tests.support.ranks import RankWorld

LIMIT_S = 60
"""Timeout of the groups: only a wait that nothing ends takes so long."""
_FILES = {module.__file__ for module in (group, messages, work, work, rounds, progress, memory)}


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
