"""Sends and receives over shared memory: tags, any source, large ones, and those that nobody waits for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from axon_nb.comm import World

pytestmark = pytest.mark.timeout(600)


def test_tagged_any_source_and_large_messages(shm_world: Any) -> None:
    def work(world: World) -> None:
        import torch.distributed as dist

        rank, n = world.rank(), world.world_size()
        right, left = (rank + 1) % n, (rank - 1) % n
        # Large ones both ways at once, and a small one with another tag that is asked for first.
        large = torch.arange(3_000_000, dtype=torch.int32) + rank
        handles = [dist.isend(large, right, tag=1), dist.isend(torch.tensor([rank]), right, tag=2)]
        small, received = torch.empty(1, dtype=torch.int64), torch.empty_like(large)
        dist.recv(small, left, tag=2)
        dist.recv(received, left, tag=1)
        assert small.item() == left
        assert torch.equal(received, large - rank + left)
        for handle in handles:
            handle.wait()
        if rank == 0:
            seen = set()
            for _ in range(n - 1):
                tensor = torch.empty(4, 3).t()
                source = dist.recv(tensor, tag=7)
                assert tensor.unique().tolist() == [float(source)]
                seen.add(source)
            assert seen == set(range(1, n))
        else:
            dist.send(torch.full((3, 4), float(rank)), 0, tag=7)
        operations = [
            dist.P2POp(dist.isend, torch.full((500_000,), float(rank)), right),
            dist.P2POp(dist.irecv, batch := torch.empty(500_000), left),
        ]
        for handle in dist.batch_isend_irecv(operations):
            handle.wait()
        assert batch.unique().tolist() == [float(left)]

    shm_world.run(work)


def test_unawaited_receives_complete(shm_world: Any) -> None:
    def work(world: World) -> None:
        import torch.distributed as dist

        rank = world.rank()
        large = torch.full((8_000_000,), float(rank))
        if rank == 0:
            handle = dist.irecv(taken := torch.empty(8_000_000), 1)
        elif rank == 1:
            dist.send(large, 0)  # does not fit into the ring: rank 0 has to take it while it waits for the barrier
        dist.barrier()
        if rank == 0:
            handle.wait()
            assert taken.unique().tolist() == [1.0]

    shm_world.run(work)


@pytest.mark.parametrize("first", ["the send", "the receive"])
def test_oversized_message_raises_at_the_receiver(shm_world: Any, first: str) -> None:
    def work(world: World) -> str:
        import torch.distributed as dist

        group: Any = dist.new_group(backend="shm")
        ring = group._messages._out[1]
        put = ring.put

        def put_and_be_refused(head: Any, address: int) -> int:
            """Return from writing the piece when the receiver has refused it: no receiver is faster."""
            count: int = put(head, address)
            limit = time.monotonic() + 60
            while ring.refused()[0] != head.number and time.monotonic() < limit:
                time.sleep(0.001)
            assert ring.refused()[:2] == (head.number, 16)
            return count

        sentence = ""
        if world.rank() == 0:
            if first == "the receive":
                ring.put = put_and_be_refused
            dist.send(torch.ones(10), 1, group=group)
        if first == "the send":
            dist.barrier()
        if world.rank() == 1:
            with pytest.raises(RuntimeError) as caught:
                dist.recv(torch.ones(4), 0, group=group)
            sentence = str(caught.value)
        dist.barrier(group)
        return sentence

    assert "rank 0 sends 40 bytes" in shm_world.run(work)[1]
