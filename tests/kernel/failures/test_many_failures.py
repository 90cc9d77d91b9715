"""Failed cells leave nothing behind on ranks over shared memory, however many there are.

`FAILED_CELLS=10000 scripts/test tests/kernel/failures/test_many_failures.py` tries any number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint, until

MANY = int(os.environ.get("FAILED_CELLS", "300"))
WARM_UP = 20
"""Failed cells after which every kind has occurred, and caches and the allocator have their size."""
GROWTH = 12 << 20
"""Bytes that a process may have more after all failures: Gloo's groups took 44 MiB for 300."""

PREPARE = """%%distributed
import torch.nn as nn
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
group = dist.new_group([0, 1])
kept = rank + 10
"""
FAIL = """
import axon_nb, random
cells = [
    "if rank == 1: raise ValueError('bug')\\ndist.all_reduce(torch.ones(1000))",
    "if rank == 0: raise ValueError('bug')\\nmodel(torch.ones(1, 64)).sum().backward()",
    "dist.barrier() if rank else dist.all_reduce(torch.ones(4))",
    "dist.recv(torch.ones(1), 1) if rank == 0 else 1 / 0",
    "work = dist.all_reduce(torch.ones(100_000), async_op=True)\\nif rank: raise KeyError('bug')\\ndist.barrier()",
    "if rank: raise ValueError('bug')\\ndist.all_gather([torch.ones(9), torch.ones(9)], torch.ones(9), group=group)",
]
def fail(count):
    failed = 0
    for number in range(count):
        try:
            axon_nb.current_cluster().run(cells[number % len(cells)], quiet=True)
        except axon_nb.CellError:
            failed += 1
    return failed
"""


@dataclass(frozen=True)
class Use:
    """What a process uses."""

    threads: int
    files: int
    maps: int
    """Groups' memories that it maps."""
    memory: int
    """Bytes that it shares with nobody."""

    def exceeds(self, before: Use) -> bool:
        """Whether it is more than before."""
        return (
            self.threads > before.threads
            or self.files > before.files
            or self.maps > before.maps
            or self.memory > before.memory + GROWTH
        )


ROUNDS = 2
"""A leak grows in each of them; what a process makes once, such as a pool of threads, in one."""
SETTLE = "%%distributed\nimport gc\nwork = None\ngc.collect(); None"
"""The last error is kept for the debugger until the next cell, and `work` by its name."""


def use_of(pid: int) -> Use:
    process = psutil.Process(pid)
    maps = sum("memfd:axon_nb_group" in one.path for one in process.memory_maps(grouped=False))
    return Use(process.num_threads(), process.num_fds(), maps, process.memory_full_info().uss)


@pytest.fixture(scope="module")
def pair() -> Iterator[Kernel]:
    """A kernel with 2 ranks over shared memory that have failed some cells."""
    with Kernel(env={"AXON_NB_CPU_BACKEND": "shm"}) as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok(PREPARE)
        kernel.ok(FAIL)
        assert kernel.value(f"fail({WARM_UP})") == WARM_UP
        yield kernel


@pytest.mark.parametrize("count", [24, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(6 * MANY)])])
def test_failed_cells_leak_no_threads_files_or_memory(pair: Kernel, count: int) -> None:
    cluster = footprint(pair)
    pids = [cluster.agent, cluster.controller, *cluster.ranks]
    pair.ok(SETTLE)
    use = {pid: use_of(pid) for pid in pids}
    grown: list[str] = []
    for _ in range(ROUNDS):
        before = dict(use)
        for done in range(0, count, 24):
            wanted = min(24, count - done)
            assert pair.value(f"fail({wanted})") == wanted
        pair.ok(SETTLE)

        def is_as_before(before: dict[int, Use] = before) -> bool:
            use.update({pid: use_of(pid) for pid in pids})
            return not any(use[pid].exceeds(before[pid]) for pid in pids)

        if until(is_as_before):
            break
        grown += [f"{before[pid]} {use[pid]}" for pid in pids if use[pid].exceeds(before[pid])]
    else:
        pytest.fail("\n".join(["more after each round:", *grown]))
    code = "model(torch.ones(1, 64)).sum().backward()\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), kept - rank"
    assert pair.ok(f"%%distributed\n{code}").lines() == ["[ranks 0-1] (2.0, 10)"]
    assert footprint(pair).ranks == cluster.ranks
