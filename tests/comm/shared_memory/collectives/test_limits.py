"""Many ranks, small slots and many pieces: each rank has its part of a slot, and no collective has too many steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from axon_nb.comm.shared_memory.collectives import rounds as rounds_module
from axon_nb.comm.shared_memory.collectives.algorithms import arithmetic, part_bytes, table_bytes
from axon_nb.comm.shared_memory.collectives.calls import Calls
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.segment.memory import Layout, SharedMemory
from axon_nb.comm.shared_memory.segment.pages import MAX_RANKS
from axon_nb.comm.shared_memory.segment.progress import Progress

PAGE = 4096


def run(size: int, layout: Layout, work: Callable[[Calls, Rounds, int], Any]) -> list[Any]:
    """What `work` returns on ranks that are threads of this process."""
    descriptor = SharedMemory.create(layout)
    ranks = [Progress(SharedMemory(descriptor, layout), rank, range(size), None) for rank in range(size)]
    os.close(descriptor)
    found: dict[int, Any] = {}

    def serve(rank: int) -> None:
        rounds = Rounds(ranks[rank], 60.0)
        found[rank] = work(Calls(rounds), rounds, rank)

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("limit", [1, 16 << 20, 0], ids=["smallest", "16 MiB", "usual"])
def test_slot_has_room_for_each_rank_at_any_limit(limit: int) -> None:
    for size in range(1, MAX_RANKS + 1):
        layout = Layout.of(size, limit)
        assert layout.slot_bytes % PAGE == layout.piece_bytes % PAGE == 0
        for table in (0, table_bytes(2 * size)):
            part = part_bytes(layout.slot_bytes, size, table)
            assert part >= 64
            assert table + size * part <= layout.slot_bytes
    assert Layout.of(16, 1).slot_bytes == Layout.of(16, 1).piece_bytes == PAGE


def test_60_ranks_exchange_tensors_in_minimum_memory() -> None:
    size = 60

    def work(calls: Calls, rounds: Rounds, rank: int) -> torch.Tensor:
        output = torch.zeros(size, 40, dtype=torch.int32)
        parts = [output[0].nbytes] * size
        sent = (torch.arange(size, dtype=torch.int32) + size * rank).repeat_interleave(40)
        calls.all_to_all_single(output, sent, parts, parts, 1)
        return output

    expected = size * torch.arange(size, dtype=torch.int32).repeat_interleave(40).view(size, 40)
    for rank, output in enumerate(run(size, Layout.of(size, 1), work)):
        assert torch.equal(output, expected + rank)


@pytest.mark.parametrize("pieces", [4, 5, 6, 7, 8, 9, 14, 30])
def test_collective_with_more_steps_than_its_counter_holds(monkeypatch: Any, pieces: int) -> None:
    monkeypatch.setattr(rounds_module, "STEPS", 8)
    size = 2

    def work(calls: Calls, rounds: Rounds, rank: int) -> list[torch.Tensor]:
        found = []
        sums = arithmetic(torch.int32, 0, size)
        for number in range(3):
            count = pieces * PAGE // 4
            own = torch.arange(count, dtype=torch.int32) + 1000 * rank + number
            calls.all_reduce(total := own.clone(), 0, sums, 1)
            calls.broadcast(copied := own.clone(), 1, 1)
            output = torch.zeros(count // 2, dtype=torch.int32)
            calls.scatter(output, list(own.chunk(2)) if rank == 0 else [], 0, 1)
            calls.all_to_all_single(swapped := torch.zeros_like(own), own, [2 * count] * 2, [2 * count] * 2, 1)
            calls.barrier(1)
            found += [total, copied, output, swapped]
        assert (rounds.sequence > 15) == (pieces > 4)  # numbers were skipped; an all_to_all also has a table
        return found

    for rank, found in enumerate(run(size, Layout.of(size, 1), work)):
        for number in range(3):
            total, copied, output, swapped = found[4 * number : 4 * number + 4]
            base = torch.arange(pieces * PAGE // 4, dtype=torch.int32) + number
            half = base.chunk(2)[rank]
            assert torch.equal(total, 2 * base + 1000)
            assert torch.equal(copied, base + 1000)
            assert torch.equal(output, half)
            assert torch.equal(swapped, torch.cat([half, half + 1000]))
