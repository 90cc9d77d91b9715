"""Dtypes of equal size that differ between ranks: an error on all ranks that notice, before anybody reads the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb.comm import World
from axon_nb.comm.errors import CollectiveMismatchError, TensorMismatchError

N = 4


def _several(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone() for _ in range(N)]


CALLS: dict[str, Callable[[int, torch.Tensor], Any]] = {
    "broadcast": lambda rank, own: dist.broadcast(own, 1),
    "all_gather": lambda rank, own: dist.all_gather(_several(own), own),
    "all_gather_into_tensor": lambda rank, own: dist.all_gather_into_tensor(own.new_empty(4 * N), own),
    "gather": lambda rank, own: dist.gather(own, _several(own) if rank == 0 else None),
    "scatter": lambda rank, own: dist.scatter(own, _several(own) if rank == 0 else None),
    "all_to_all": lambda rank, own: dist.all_to_all(_several(own), _several(own)),
    "all_to_all_single": lambda rank, own: dist.all_to_all_single(own.clone(), own),
}


@pytest.mark.parametrize("name", CALLS)
def test_dtype_mismatch_in_collective_raises_on_all_ranks(shm_world: Any, name: str) -> None:
    def work(world: World) -> tuple[str, list[float]]:
        rank = world.rank()
        own = torch.ones(4, dtype=torch.int32 if rank == 2 else torch.float32)
        with pytest.raises(CollectiveMismatchError) as found:
            CALLS[name](rank, own)
        dist.all_reduce(total := torch.ones(1))
        assert total.item() == N
        return str(found.value), own.tolist()

    answers = shm_world.run(work)
    assert all(own == [1.0] * 4 for _, own in answers)
    count = "" if name.startswith("all_to_all") else "4 "
    words = [
        f"rank 2 passed {count}int32",
        f"ranks 0-1,3 passed {count}float32",
        name.partition("_into")[0].removesuffix("_single"),
    ]
    assert any(all(word in sentence for word in words) for sentence, _ in answers), answers


@pytest.mark.parametrize("size", [3, 2_000_000])
@pytest.mark.parametrize("first", ["the send", "the receive"])
def test_message_of_another_dtype_is_rejected(shm_world: Any, size: int, first: str) -> None:
    def work(world: World) -> tuple[str, Any]:
        rank, sentence, next_one = world.rank(), "", torch.zeros(1)
        taken = torch.zeros(size, dtype=torch.int32)
        handle: Any = None
        if rank == 0:
            if first == "the receive":
                dist.recv(torch.empty(1), 1, tag=9)  # rank 1 has posted its receive
            handle = dist.isend(torch.ones(size), 1)
            dist.isend(torch.full((1,), 7.0), 1, tag=3).wait()  # type: ignore[union-attr]
        elif rank == 1:
            if first == "the receive":
                handle = dist.irecv(taken, 0)
                dist.send(torch.ones(1), 0, tag=9)
            else:
                dist.recv(next_one, 0, tag=3)
                handle = dist.irecv(taken, 0)
        if handle is not None:
            try:
                handle.wait()
            except TensorMismatchError as error:
                sentence = str(error)
        if rank == 1 and first == "the receive":
            dist.recv(next_one, 0, tag=3)
        dist.barrier()
        return sentence, (taken.any().item(), next_one.item())

    answers = shm_world.run(work)
    expected = "rank 0 sends float32, but rank 1 receives into int32; both tensors must have the same dtype."
    assert expected in answers[1][0]
    assert answers[1][1] == (False, 7.0)
    # A message of one piece is sent once it is in memory, whether it is received or not.
    if size > 3 and first == "the receive":
        assert expected in answers[0][0]
