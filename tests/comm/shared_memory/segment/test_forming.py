"""A rank that cannot get the memory of a group says why, on all ranks and at once."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from axon_nb.comm import World
from axon_nb.comm.errors import CommError

SOON_S = 30.0
"""Far less than the timeout of the group."""


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
