"""Programs that start their own ranks, beside a cluster and in its cells: `mp.spawn`, torchrun, pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Kernel

SPAWNS = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PORT = str(20000 + os.getppid() % 20000)

def work(rank, size, folder):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=PORT)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.full((2,), float(rank + 1))
    dist.all_reduce(total)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(total.tolist()))
    dist.barrier()
    dist.destroy_process_group()

def start(folder, size=2):
    mp.spawn(work, args=(size, folder), nprocs=size, join=True)
    return [open(f"{folder}/{rank}").read() for rank in range(size)]

def test_sum(tmp_path):
    assert start(str(tmp_path)) == ["[3.0, 3.0]"] * 2

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        total = torch.full((2,), float(dist.get_rank() + 1))
        dist.all_reduce(total)
        print(f"torchrun: {total.tolist()}", flush=True)
        dist.destroy_process_group()
    else:
        print(start(sys.argv[1]))
"""
"""Starts two ranks as the tests of courses do, is a test itself, and runs under torchrun."""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """The folder of the module `spawns`."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    (tmp_path / "out").mkdir()
    return tmp_path


def test_programs_start_their_own_ranks_beside_a_cluster(kernel: Kernel, module: Path) -> None:
    out = module / "out"
    kernel.ok(f"import sys; sys.path.insert(0, {str(module)!r})\nimport spawns")
    assert kernel.ok(f"print(spawns.start({str(out)!r}))").lines() == ["['[3.0, 3.0]', '[3.0, 3.0]']"]
    assert kernel.ok(f"!{{sys.executable}} {module}/spawns.py {out}").lines() == ["['[3.0, 3.0]', '[3.0, 3.0]']"]
    launched = f"-m torch.distributed.run --standalone --nproc-per-node 2 {module}/spawns.py"
    printed = " ".join(kernel.ok(f"!{{sys.executable}} {launched}").lines())  # two processes may share a line
    assert printed.count("torchrun: [3.0, 3.0]") == 2
    tested = kernel.ok(f"!{{sys.executable}} -m pytest -q -p no:cacheprovider {module}/spawns.py")
    assert any("1 passed" in line for line in tested.lines())
    assert kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines() == ["[ranks 0-3] 4.0"]


def test_mp_spawn_in_a_cell_calls_the_function_as_its_ranks(kernel: Kernel, module: Path) -> None:
    reply = kernel.ok(
        f"%%distributed\nimport sys; sys.path.insert(0, {str(module)!r})\nimport spawns\n"
        f"spawns.start({str(module / 'out')!r}, 4)"
    )
    assert reply.lines()[-1] == "[ranks 0-3] ['[10.0, 10.0]', '[10.0, 10.0]', '[10.0, 10.0]', '[10.0, 10.0]']"
    kernel.ok("%%distributed\nimport torch.multiprocessing as mp\nmp.start_processes(print, args=('said',), nprocs=4)")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            "mp.spawn(print, nprocs=2)",
            "each of the 4 ranks calls fn. Pass nprocs=world_size, or start 2 with `%distributed start -n 2`",
        ),
        (
            "mp.start_processes(print, nprocs=4, join=False)",
            "ranks call fn themselves, and wait for its end; omit join",
        ),
    ],
)
def test_mp_spawn_that_ranks_cannot_serve_says_why(kernel: Kernel, call: str, sentence: str) -> None:
    reply = kernel.run(f"%%distributed\nimport torch.multiprocessing as mp\n{call}")
    assert sentence in reply.traceback
