"""Deaths are noticed by all who need the dead rank, whatever else they wait for, and by nobody else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm import World
from tests.support.processes import until
from tests.support.ranks import RankWorld


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
