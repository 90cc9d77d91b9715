"""Dead ranks are replaced, get the state of others, and the repair itself may be interrupted."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil
import pytest

from tests.kernel.recovery.conditions import INTERRUPTED, sleeps_masked, spins, touch_when
from tests.support.kernel import FreshCluster, Kernel, Reply
from tests.support.processes import footprint, until

DIE = "%%distributed\nimport os\nif rank == 2: os._exit(3)\ndist.barrier()"

TRAINING = """%%distributed
import collections, random, threading
from datetime import timedelta
import numpy as np
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(rank)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    def forward(self, x):
        return self.layers(x)

pair = dist.new_group([1, 2], timeout=timedelta(seconds=77))
ddp = DDP(Net(), bucket_cap_mb=0.002)
optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
Point = collections.namedtuple("Point", "x y")
bag = {"net": ddp.module, "point": Point(1, 2), "step of": None}
data = TensorDataset(torch.arange(24.0))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
lock, opened, running = threading.Lock(), open("/dev/null"), (n for n in range(3))
base = torch.zeros(8)
view = base[2:4]
steps = 0

def step():
    global steps
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * steps + rank))
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    scheduler.step()
    steps += 1

def same(tensors):
    own = torch.cat([t.detach().double().flatten() for t in tensors])
    others = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(others, own)
    return all(torch.equal(own, other) for other in others)

def moments():
    return [optimizer.state[p]["exp_avg_sq"] for p in ddp.parameters()]

for _ in range(3):
    step()
"""

WHOLE = "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), globals().get('kept')"


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
    lines = kernel.ok("%distributed repair --from 1").lines()
    for name in ("model", "opt", "once", "twice"):
        assert f"Not copied: `{name}` is sharded: each rank holds its own part." in lines
    assert "Not copied: `grid` is a device mesh: recreate it on all ranks." in lines
    last = lines[-1]
    # 2 x (64 x 64 + 64) numbers of 4 bytes in 4 parts; Adam has two of each, and no part of its step counters.
    assert last.startswith("Only rank 2 held its part of `model` (4 of 4 parameters, 8.12 KiB) and its part of `op")
    assert "(8 of 12 state tensors, 16.2 KiB) and its part of `once` (16 B)" in last
    assert last.endswith(": load a checkpoint on all ranks, or recreate them.")
    assert "`twice`" not in last
    assert "`layer`" not in last
    left = kernel.ok("%%distributed --ranks 0,1,3\nonce.to_local().tolist()").lines()
    assert sorted(left)[0] == "[rank 0] [0.0, 1.0, 2.0, 3.0]"
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


@pytest.mark.slow
def test_rank_that_never_rebuilds_its_groups_ends_the_wait(fresh_cluster: FreshCluster, tmp_path: Path) -> None:
    kernel = fresh_cluster(2)
    os.mkfifo(tmp_path / "fifo")
    kernel.ok(WAIT_IN_C.format(fifo=str(tmp_path / "fifo")))
    planted = "import axon_nb.engine.kernel.interrupts as t_module\nt_module.recover = lambda epoch: t_wait_in_c()"
    kernel.ok(f"%%distributed --ranks 1\n{planted}")
    reply = kernel.run("%%distributed\nkept = rank\nif rank == 0: raise ValueError('bug')\ndist.barrier()", timeout=100)
    assert "ValueError: bug" in reply.traceback
    refused = kernel.run("%%distributed --ranks 0\ndist.all_reduce(torch.ones(1))")
    assert "rank 1 is stuck in an earlier cell; run `%distributed repair --ranks 1`" in refused.traceback
    assert "Replaced rank 1" in kernel.ok("%distributed repair --ranks 1").stdout
    assert sorted(kernel.ok(WHOLE).lines()) == ["[rank 0] (2.0, 0)", "[rank 1] (2.0, None)"]


@pytest.fixture(scope="module")
def repaired() -> Iterator[tuple[Kernel, Reply]]:
    """A kernel with 3 ranks that train; rank 2 has died and was replaced with what rank 0 has."""
    with Kernel() as kernel:
        kernel.load_and_warm_up()
        kernel.ok("%distributed start -n 3")
        kernel.ok(TRAINING)
        assert "rank 2 exited with code 3" in kernel.run(DIE).traceback
        yield kernel, kernel.ok("%distributed repair --from 0")


def test_repair_reports_copied_and_skipped_variables(repaired: tuple[Kernel, Reply]) -> None:
    lines = repaired[1].lines()
    assert lines[0].startswith("Replaced rank 2: new, with `DDP`, ")
    assert lines[0].endswith("and the random state of rank 0. All other ranks keep their state.")
    assert lines[1:] == [
        "Not copied: `lock` holds a lock, which stays with its process.",
        "Not copied: `opened` is an open file, which stays with its process.",
        "Not copied: `running` is a generator, which stays with its process.",
    ]


def test_training_continues_with_equal_weights_and_optimizer_state(repaired: tuple[Kernel, Reply]) -> None:
    kernel, _ = repaired
    kernel.ok("%%distributed\nbefore = steps\nfor _ in range(4): step()")
    state = "steps - before, same(ddp.parameters()), same(moments()), round(scheduler.get_last_lr()[0], 9)"
    assert len(kernel.ok(f"%%distributed\nprint({state})").lines()) == 1
    assert "4, True, True" in kernel.ok(f"%%distributed\nprint(({state}))").stdout


def test_object_references_are_preserved(repaired: tuple[Kernel, Reply]) -> None:
    kernel, _ = repaired
    checks = [
        "bag['net'] is ddp.module",
        "scheduler.optimizer is optimizer",
        "optimizer.param_groups[0]['params'][0] is next(ddp.parameters())",
        "type(bag['point']) is Point and type(ddp.module) is Net",
        "loader.sampler is sampler and sampler.rank == rank",
        "step.__globals__ is globals()",
        "(base.fill_(7), view.sum().item())[1] == 14",
        "ddp.process_group is dist.group.WORLD",
        "rank == dist.get_rank() and world.rank() == rank",
    ]
    for check in checks:
        assert kernel.ok(f"%%distributed\nprint(bool({check}))").lines() == ["[ranks 0-2] True"], check


def test_replaced_rank_gets_its_groups_even_without_the_source(repaired: tuple[Kernel, Reply]) -> None:
    code = "t = torch.ones(1)\nif rank: dist.all_reduce(t, group=pair)\nt.item(), rank and pair.timeout.total_seconds()"
    assert sorted(repaired[0].ok(f"%%distributed\n{code}").lines()) == ["[rank 0] (1.0, 0)", "[ranks 1-2] (2.0, 77.0)"]


def test_random_state_is_copied_from_the_source(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("%%distributed\nimport random, numpy as np\nfor f in (random.seed, np.random.seed): f(rank)")
    kernel.run("%%distributed\ntorch.manual_seed(rank)\nimport os\nif rank == 1: os.kill(os.getpid(), 9)")
    kernel.ok("%distributed repair --from 0")
    drawn = kernel.ok("%%distributed\nprint(random.random(), np.random.rand(), torch.rand(3).tolist())")
    assert len(drawn.lines()) == 1, drawn.stdout


@pytest.mark.slow
def test_only_named_variables_are_copied_even_if_large(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("%%distributed\nbig = torch.arange(40_000_000) + rank\nleft, small = 1, [1, 2]")
    reported = kernel.ok("%distributed repair --ranks 1 --from 0 big small absent", timeout=120)
    assert "with `big`, `small` (305 MiB)" in reported.stdout
    assert "Not copied: `absent` does not exist on rank 0." in reported.lines()
    after = kernel.ok("%%distributed --ranks 1\nbig[0].item(), big[-1].item(), small, 'left' in globals()")
    assert after.lines() == ["[rank 1] (0, 39999999, [1, 2], False)"]


@pytest.mark.slow
def test_rank_0_and_unusual_ddp_objects_are_replaced_too(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(3)
    code = """import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
others = dist.new_group([0, 2])
fixed = DDP(nn.Linear(8, 8), static_graph=True)
hooked = DDP(nn.Linear(8, 8))
hooked.register_comm_hook(None, default_hooks.allreduce_hook)
two = DDP(nn.Linear(8, 8), process_group=others) if rank != 1 else None
models = [model for model in (fixed, hooked, two) if model is not None]
optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
def step(seed):
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed + rank))).sum().backward()
        optimizer.step()
for seed in range(3): step(seed)"""
    kernel.ok(f"%%distributed\n{code}")
    assert "Replaced rank 0" in kernel.ok("%distributed repair --ranks 0 --from 2").stdout
    kernel.ok("%%distributed\nfor seed in range(3): step(10 + seed)")
    for ranks, model in (("0-2", "fixed"), ("0-2", "hooked"), ("0,2", "two")):
        reported = kernel.ok(f"%%distributed --ranks {ranks}\nprint({model}.module.weight.double().sum().item().hex())")
        assert len(reported.lines()) == 1, model


class NewProcesses:
    """Sends a signal to each process that the agent forks inside the block."""

    def __init__(self, agent: int, number: int) -> None:
        self._agent, self._number = psutil.Process(agent), number
        self._known = {child.pid for child in self._agent.children()}
        self._over = threading.Event()
        self.found = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.002):
            for child in self._agent.children():
                if child.pid not in self._known:
                    self._known.add(child.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.send_signal(self._number)
                    self.found.set()

    def __enter__(self) -> NewProcesses:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def three() -> Iterator[Kernel]:
    """A kernel with 3 ranks, of which rank 2 is dead."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3")
        kernel.ok("%%distributed\nkept = rank")
        kernel.run("%%distributed\nimport os\nif rank == 2: os._exit(3)")
        yield kernel


def test_replacement_that_dies_or_is_not_awaited_is_undone_and_the_next_repair_works(three: Kernel) -> None:
    with NewProcesses(footprint(three).agent, signal.SIGKILL):
        reply = three.run("%distributed repair")
    assert reply.ename == "StartError", (reply.stdout, reply.stderr)
    assert "Rank 2 failed to start: it was killed by SIGKILL" in reply.traceback
    assert "Run `%distributed repair` to try again." in reply.traceback
    assert reply.seconds < 15, "without waiting for the new process's time limit of 30 s"
    story = reply.traceback.partition("What happened:")[2]
    assert re.search(r"rank 2 dead → starting(?s:.*)rank 2 starting → failed to start(?s:.*)kill the new ranks", story)
    with NewProcesses(footprint(three).agent, signal.SIGSTOP) as new:
        request = three.submit("%distributed repair")
        assert new.found.wait(120)
        time.sleep(0.5)
        three.interrupt()
        reply = three.collect(request)
    assert "Interrupted before rank 2 started. Run `%distributed repair` to try again." in reply.traceback
    assert "Replaced ranks 1-2: " in three.ok("%distributed repair --ranks 1").stdout
    assert sorted(three.ok(WHOLE).lines()) == ["[rank 0] (3.0, 0)", "[ranks 1-2] (3.0, None)"]


def test_attach_reports_a_rank_left_by_a_killed_repair(three: Kernel) -> None:
    cluster = footprint(three)
    with NewProcesses(cluster.agent, signal.SIGSTOP) as new:
        three.submit("%distributed repair")
        assert new.found.wait(120)
        three.come_back()
    reply = three.ok("%load_ext axon_nb\n%distributed attach")
    assert "Idle rank 2 was being replaced when its notebook was killed." in reply.stderr
    assert "Rank 2 was being replaced" in three.run("%%distributed\n1").traceback
    assert "Replaced rank 2" in three.ok("%distributed repair").stdout
    assert sorted(three.ok(WHOLE).lines()) == ["[rank 0] (3.0, 0)", "[rank 1] (3.0, 1)", "[rank 2] (3.0, None)"]
    now = footprint(three)
    three.ok("%distributed stop")
    assert until(now.gone)
    assert until(cluster.gone)
