"""A dead rank is replaced, on request, automatically or after a second interrupt; what is lost is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from tests.kernel.recovery.conditions import INTERRUPTED, sleeps_masked, spins, touch_when
from tests.support.kernel import FreshCluster, Kernel, Reply
from tests.support.processes import until

DIE = "%%distributed\nimport os\nif rank == 2: os._exit(3)\ndist.barrier()"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--from 9", "All ranks are alive"),
        ("--ranks 1 --from 9", "--from must be a rank from 0 to 3; got 9."),
        ("--ranks 1 --from 1", "rank 1 is being replaced; choose a surviving rank"),
        ("--ranks 1 model", "Names need a rank to copy from: use `--from 0 model`."),
        ("--ranks 1 --from x", "must be an integer"),
    ],
)
def test_invalid_repair_changes_nothing(kernel: Kernel, arguments: str, sentence: str) -> None:
    reply = kernel.run(f"%distributed repair {arguments}")
    assert reply.ename == "UsageError"
    assert sentence in reply.traceback
    assert kernel.ok("%%distributed\n'alive'").lines() == ["[ranks 0-3] 'alive'"]


SHARDED = """%%distributed
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
world_mesh = init_device_mesh("cpu", (4,))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
for layer in model:
    fully_shard(layer, mesh=world_mesh)
fully_shard(model, mesh=world_mesh)
opt = torch.optim.Adam(model.parameters(), 1e-3)
model(torch.randn(2, 64)).sum().backward()
opt.step()
twice = distribute_tensor(torch.arange(8.0), grid, [Replicate(), Shard(0)])
once = distribute_tensor(torch.arange(16.0), world_mesh, [Shard(0)])
plain = nn.Linear(3, 3)
"""


def test_shards_lost_with_a_dead_rank_are_reported(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(4)
    kernel.ok(SHARDED)
    kernel.run(DIE)
    last = kernel.ok("%distributed repair --from 1").lines()[-1]
    # 2 x (64 x 64 + 64) numbers of 4 bytes in 4 parts; Adam has two of each, and no part of its step counters.
    assert last.startswith("Only rank 2 held its part of `model` (4 of 4 parameters, 8.12 KiB) and its part of `op")
    assert "(8 of 12 state tensors, 16.2 KiB) and its part of `once` (16 B)" in last
    assert last.endswith(": load a checkpoint on all ranks, or recreate them.")
    assert "`twice`" not in last
    assert "`layer`" not in last
    left = kernel.ok("%%distributed --ranks 0,1,3\nonce.to_local().tolist()").lines()
    assert sorted(left)[0] == "[rank 0] [0.0, 1.0, 2.0, 3.0]"


def test_sharded_objects_are_not_copied(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(4)
    kernel.ok(SHARDED)
    kernel.run(DIE)
    lines = kernel.ok("%distributed repair --from 1").lines()
    for name in ("model", "opt", "once", "twice"):
        assert f"Not copied: `{name}` is sharded: each rank holds its own part." in lines
    assert "Not copied: `grid` is a device mesh: recreate it on all ranks." in lines
    assert kernel.ok("%%distributed --ranks 2\nplain.weight.shape").lines() == ["[rank 2] torch.Size([3, 3])"]
    kernel.ok(SHARDED)


def test_stage_lost_with_a_dead_rank_is_reported(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(3)
    code = "from torch.distributed.pipelining import PipelineStage\n"
    code += "stage = PipelineStage(torch.nn.Linear(4, 4), rank, world_size, device)"
    kernel.ok(f"%%distributed\n{code}")
    kernel.run(DIE)
    lines = kernel.ok("%distributed repair --from 0").lines()
    assert "Not copied: `stage` is a pipeline stage: each rank holds its own." in lines
    assert lines[-1].startswith("Only rank 2 held stage 2 of 3 (`stage`): load a checkpoint")


def test_repair_does_not_wait_for_a_cell(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(3)
    kernel.ok("%%distributed --ranks 0 --noblock --out handle\nimport time\ntime.sleep(600)")
    reply = kernel.run("%distributed repair --ranks 2")
    assert "Rank 0 is still running a cell: wait for it or interrupt it, then repair." in reply.traceback
    kernel.ok("handle.cancel()\ntry: handle.result(100)\nexcept KeyboardInterrupt: pass")
    assert "Replaced rank 2" in kernel.ok("%distributed repair --ranks 2").stdout


def test_auto_repair_runs_before_the_next_cell(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(3)
    kernel.ok("%distributed config auto_repair=on")
    kernel.run(DIE)
    after = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines()
    said = "Replaced rank 2, which exited with code 3: new and empty. All other ranks keep their state."
    assert after == [said, "[ranks 0-2] 3.0"]
    assert kernel.ok("%%distributed\n1").lines() == ["[ranks 0-2] 1"]


IN_C = {
    "C code": "hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2**31 - 1)",
    "C code that keeps the interpreter's lock": "sum(range(10**13))",
}


WAIT_IN_C = """%%distributed
import ctypes, os, signal
t_fifo = os.open({fifo!r}, os.O_RDWR)
def t_wait_in_c():
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        ctypes.CDLL(None).read(t_fifo, ctypes.create_string_buffer(1), 1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
"""
"""Defines a function that waits in C code, whatever signals arrive, until somebody writes a byte into the FIFO."""


def interrupt_in_c_code(
    kernel: Kernel,
    code: str,
    ranks: Collection[int],
    folder: Path,
    *,
    are_there: Callable[[int], bool] = spins,
) -> str:
    """Send the cell, and interrupt it when all ranks have begun it and these are in C code; the request."""
    kernel.ok("%%distributed --quiet --out pids\nimport hashlib, os\nos.getpid()")
    pids = kernel.value("dict(pids.values)")
    # By files: what a rank prints stays there when it keeps the interpreter's lock.
    request = kernel.submit(f"%%distributed\nopen({str(folder)!r} + f'/{{rank}}', 'w').close()\n{code}")
    assert until(lambda: all((folder / str(rank)).exists() for rank in pids), timeout=100)
    assert all(are_there(pids[rank]) for rank in ranks)
    kernel.interrupt()
    return request


def interrupt_again(kernel: Kernel, request: str, noticed: Path) -> Reply:
    """Interrupt again: interrupts within a second of the first, once that was noticed, count as one."""
    assert until(noticed.exists, timeout=100)
    time.sleep(1.2)
    kernel.interrupt()
    return kernel.collect(request)


@pytest.mark.parametrize("what", IN_C)
def test_second_interrupt_replaces_ranks_in_c_code(fresh_cluster: FreshCluster, tmp_path: Path, what: str) -> None:
    kernel = fresh_cluster(3)
    kernel.ok("%%distributed\nkept = rank")
    touch_when(kernel, INTERRUPTED, tmp_path / "noticed")
    request = interrupt_in_c_code(kernel, f"if rank == 1:\n    {IN_C[what]}\ndist.barrier()", [1], tmp_path)
    reply = interrupt_again(kernel, request, tmp_path / "noticed")
    assert reply.ename == "CellInterrupt"
    assert "[rank 1] is still in C code" in reply.traceback
    assert "Replaced rank 1: new and empty. All other ranks keep their state." in reply.traceback
    after = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), globals().get('kept')")
    assert sorted(after.lines()) == ["[rank 0] (3.0, 0)", "[rank 1] (3.0, None)", "[rank 2] (3.0, 2)"]


@pytest.mark.slow
def test_second_interrupt_replaces_all_ranks_if_all_are_in_c_code(fresh_cluster: FreshCluster, tmp_path: Path) -> None:
    kernel = fresh_cluster(2)
    touch_when(kernel, INTERRUPTED, tmp_path / "noticed")
    request = interrupt_in_c_code(kernel, IN_C["C code"], [0, 1], tmp_path)
    reply = interrupt_again(kernel, request, tmp_path / "noticed")
    assert "Replaced ranks 0-1: new and empty. No rank keeps its state." in reply.traceback
    after = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), 'hashlib' in globals()")
    assert after.lines() == ["[ranks 0-1] (2.0, False)"]


def test_dead_ranks_are_replaced_with_the_selected_one(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(3)
    kernel.ok("%%distributed\nfrom datetime import timedelta\nown = dist.new_group(timeout=timedelta(seconds=77))")
    kernel.run(DIE)
    assert "Replaced ranks 1-2: " in kernel.ok("%distributed repair --ranks 1 --from 0").stdout
    after = kernel.ok("%%distributed\ndist.barrier(own)\nown.timeout.total_seconds()").lines()
    assert after == ["[ranks 0-2] 77.0"]


def test_all_ranks_are_replaced_if_all_are_dead(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    reply = kernel.run("%%distributed\nimport os\nos._exit(3)")
    assert "`%distributed repair`" in reply.traceback
    assert "Replaced ranks 0-1: new and empty. No rank keeps its state." in kernel.ok("%distributed repair").stdout
    assert kernel.ok("%%distributed\ndist.barrier()\n1").lines() == ["[ranks 0-1] 1"]


def test_first_interrupt_names_the_rank_in_c_code_without_killing(fresh_cluster: FreshCluster, tmp_path: Path) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("%%distributed\nimport os")
    pid = kernel.ok("%%distributed --ranks 1\nprint(os.getpid())").lines()
    request = interrupt_in_c_code(kernel, f"if rank == 1:\n    {IN_C['C code']}", [1], tmp_path)
    reply = kernel.collect(request)
    assert "Rank 0 stopped." in reply.traceback
    assert "[rank 1] is still in C code at line 4 and does not react to interrupts" in reply.traceback
    assert "Rank 1 did not stop. Run `%distributed repair --ranks 1` to replace it" in reply.traceback
    assert "still stuck in an earlier cell" in kernel.run("%%distributed\n1").traceback
    kernel.ok("%distributed repair --ranks 1")
    assert kernel.ok("%%distributed --ranks 1\nimport os\nprint(os.getpid())").lines() != pid


def test_groups_are_rebuilt_once_a_stuck_rank_returns(fresh_cluster: FreshCluster, tmp_path: Path) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("%%distributed\nkept = rank + 1")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    kernel.ok(WAIT_IN_C.format(fifo=str(fifo)))
    code = "if rank == 1:\n    t_wait_in_c()\ndist.barrier()"
    reply = kernel.collect(interrupt_in_c_code(kernel, code, [1], tmp_path, are_there=sleeps_masked))
    assert "Rank 1 did not stop. Run `%distributed repair --ranks 1` to replace it" in reply.traceback
    refused = kernel.run("%distributed repair")
    assert "Rank 1 is stuck in an earlier cell and cannot rejoin" in refused.traceback
    assert "run `%distributed repair --ranks 1` to replace it." in refused.traceback
    refused = kernel.run("%%distributed --ranks 0\ndist.all_reduce(torch.ones(1))")
    assert "rank 1 is stuck in an earlier cell; run `%distributed repair --ranks 1`" in refused.traceback
    with fifo.open("r+b", buffering=0) as writer:
        writer.write(b"x")
    sums = "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), kept - rank"
    first: list[str] = []

    def is_back() -> bool:
        reply = kernel.run(sums)
        first[:] = reply.lines()
        return reply.ok

    assert until(is_back)
    assert first == ["Rebuilt the process groups. All ranks keep their state.", "[ranks 0-1] (2.0, 1)"]
    assert "All ranks are alive" in kernel.run("%distributed repair").traceback
