"""Calls of ranks that share a card, over Gloo: a device written in Python stands in for the card."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.collectives.movement import recv, send
from axon_nb.engine.groups.creation import init_default_group
from tests.engine.groups.native_ranks import run_on_ranks
from tests.support.fake_device import install


def _join(rank: int, store: Any, backend: str) -> torch.device:
    dist.destroy_process_group()
    device = install()
    place: dict[str, Any] = {"store": store, "rank": rank, "world_size": 2, "device": device}
    init_default_group(backend, **place, timeout_s=60, recoverable=True)
    return device


def _polls(rank: int, store: Any) -> list[list[float]]:
    """Rank 1 asks whether its message is there, and never waits for it."""
    device = _join(rank, store, "shm")
    if rank == 0:
        dist.send(torch.arange(6.0).view(2, 3).to(device), 1)
        return []
    buffer = torch.zeros(2, 3).to(device)
    work = dist.irecv(buffer, 0)
    end = time.monotonic() + 60
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    return _values(buffer)


def test_polled_receive_has_its_values(tmp_path: Path) -> None:
    assert run_on_ranks(_polls, 2, tmp_path) == {0: [], 1: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]}


def _exchange(rank: int, store: Any) -> dict[str, Any]:
    device = _join(rank, store, "gloo")
    peer, found = 1 - rank, {}
    values = torch.arange(6.0).view(2, 3)

    def received(tensor: torch.Tensor) -> tuple[str, list[list[float]]]:
        return str(tensor.device), _values(tensor)

    buffer = torch.empty(2, 3, device=device).requires_grad_()  # as a pipeline stage's
    if rank == 0:
        dist.send(values.to(device), peer)
    else:
        dist.recv(buffer, peer)
        found["recv"] = received(buffer)

    mine, theirs = (values * (rank + 1)).to(device), torch.empty(2, 3, device=device)
    operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found["batch"] = received(theirs)

    group: Any = dist.group.WORLD
    parts = [[torch.empty(2, 3, device=device)] for _ in range(2)]
    group.allgather_coalesced(parts, [mine]).wait()
    found["gather"] = [received(part) for (part,) in parts]

    if rank == 0:
        send(values.to(device), peer)
    else:
        found["new"] = received(recv(peer))
    return found


def _values(tensor: torch.Tensor) -> list[list[float]]:
    host = torch.empty(tensor.shape)
    with torch.no_grad():
        host.copy_(tensor)
    return host.tolist()


def test_tensors_on_a_card_travel_through_host_memory(tmp_path: Path) -> None:
    found = run_on_ranks(_exchange, 2, tmp_path)
    values = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    here = ("standin:0", values)
    doubled = ("standin:0", [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]])
    assert found[0] == {"batch": doubled, "gather": [here, doubled]}
    assert found[1] == {"recv": here, "batch": here, "gather": [here, doubled], "new": here}
