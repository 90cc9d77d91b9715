"""Kernels and agents that are killed, and failures by the hundred: nothing is left behind.

`FAILED_CELLS=10000 scripts/test tests/kernel/failures/test_kills.py` tries any number.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.kernel import Kernel
from tests.support.processes import Footprint, below, ended, footprint, until

pytestmark = pytest.mark.timeout(600)

MakeKernel = Callable[..., Kernel]

LIMIT_S = 60.0
"""Beyond the keep-alive time nothing of a cluster may be left after this: far less on a machine that is not busy."""
KEEP_ALIVE_S = 1.0

BUSY = "import time\nprint('go', flush=True)\ntime.sleep(600)"

DAEMON = (
    "import subprocess, sys\n"
    "child = 'import os, time; os.fork() or time.sleep(600)'\n"
    "t_started = subprocess.Popen([sys.executable, '-c', child], start_new_session=True).pid"
)

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


def start(kernel: Kernel, n: int = 2) -> Footprint:
    kernel.ok(f"%load_ext axon_nb\n%distributed config keep_alive={KEEP_ALIVE_S:g}")
    kernel.ok(f"%distributed start -n {n}")
    return footprint(kernel)


def left_in_memory(before: set[str]) -> set[str]:
    """Names of this user's shared-memory blocks that have come since and belong to no living process.

    torch calls its own `torch_PID_…`, by who made them; others than this test's processes make some, too.
    """
    return {name for name in shared_memory() - before if not psutil.pid_exists(_maker(name))}


def _maker(name: str) -> int:
    found = re.match(r"torch_(\d+)_", name)
    return int(found[1]) if found else -1


def shared_memory() -> set[str]:
    """Names of the shared-memory blocks of this user."""
    found = set()
    for path in Path("/dev/shm").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.getuid():
                found.add(path.name)
    return found


def assert_gone(cluster: Footprint) -> None:
    assert until(cluster.gone, timeout=KEEP_ALIVE_S + LIMIT_S), (
        cluster.folder.exists(),
        [process for process in cluster.processes if not ended(process)],
    )


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_start_works_after_kernel_and_agent_kills(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    for victims in ("kernel", "agent", "both"):
        cluster = start(kernel)
        if victims != "kernel":
            kill(cluster.agent)
        if victims != "agent":
            kernel.come_back()
        assert_gone_or_swept(kernel, cluster)
    kernel.ok("%load_ext axon_nb")
    kernel.ok("%distributed start -n 2")
    assert kernel.ok("%%distributed\ndist.barrier()\nworld_size").lines() == ["[ranks 0-1] 2"]


def assert_gone_or_swept(kernel: Kernel, cluster: Footprint) -> None:
    """A killed agent cannot remove its own folder: the next look at what is running does."""
    assert until(cluster.all_ended, timeout=LIMIT_S + KEEP_ALIVE_S)
    kernel.ok("__import__('axon_nb.cluster.session.clusters', fromlist=['x']).running()")
    assert until(lambda: not cluster.folder.exists(), timeout=LIMIT_S)


def test_kernel_killed_during_shared_memory_allocation(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    before = shared_memory()
    cluster = start(kernel)
    code = (
        "from torch.utils.data import DataLoader, TensorDataset\ndata = TensorDataset(torch.randn(64, 512))\n"
        "print('go', flush=True)\nwhile True:\n    for batch in DataLoader(data, batch_size=8, num_workers=1): pass"
    )
    request = kernel.submit(f"%%distributed\n{code}")
    kernel.wait_for_output(request, "go")
    kernel.kill()
    assert_gone(cluster)
    assert until(lambda: not left_in_memory(before), timeout=LIMIT_S), left_in_memory(before)


def test_kernel_shutdown_during_a_cell(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    cluster = footprint(kernel)
    request = kernel.submit(f"%%distributed\n{BUSY}")
    kernel.wait_for_output(request, "go")
    kernel.shutdown()
    assert until(cluster.gone, timeout=LIMIT_S), "gone at once, whatever the keep-alive time"


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder for run folders alone, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="axk-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_kernel_killed_during_cluster_start(base: Path, new_kernel: MakeKernel) -> None:
    kernel = new_kernel(AXON_NB_RUNTIME_DIR=str(base), AXON_NB_WARM_UP="0")
    kernel.ok("%load_ext axon_nb")
    kernel.ok("%distributed config keep_alive=5")  # should it have started before it is killed
    for moment in ("agent.sock", "profile/security/ipcontroller-client.json", "profile/log/rank0.log"):
        kernel.submit("%distributed start -n 2")
        assert until(lambda moment=moment: below(base, f"*/*/{moment}")), moment
        kernel.come_back()
        assert until(lambda: not below(base, "*/*")), (moment, below(base, "*/*"))
        kernel.ok("%load_ext axon_nb\n%distributed config keep_alive=5")
    kernel.ok("%distributed start -n 2")
    assert kernel.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]


def test_ranks_killed_in_turn_are_reported_and_others_continue(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    cluster = start(kernel, 3)
    for rank in range(2):
        request = kernel.submit(f"%%distributed --ranks {rank}-2\n{BUSY}")
        kernel.wait_for_output(request, "go")
        kill(cluster.ranks[rank])
        reply = kernel.collect(request)
        assert reply.ename == "CellError"
        assert f"rank {rank} was killed by SIGKILL" in reply.traceback
        assert "`%distributed repair`" in reply.traceback
    assert kernel.ok("%%distributed --ranks 2\n'still here'").lines() == ["[rank 2] 'still here'"]
    kill(cluster.ranks[2])
    assert until(lambda: "Rank 2 was killed" in kernel.run("%%distributed --ranks 2\n1").traceback)
    kernel.ok("%distributed stop")
    assert_gone(cluster)
    kernel.ok("%distributed start -n 2")


@pytest.mark.slow
def test_all_ranks_killed_while_the_kernel_is_away(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    cluster = footprint(kernel)
    kernel.come_back()
    for pid in cluster.ranks:
        kill(pid)
    assert until(lambda: all(ended(p) for p in cluster.processes if p.pid in cluster.ranks))
    kernel.ok("%load_ext axon_nb")
    reply = kernel.run("%distributed attach")
    assert reply.ename == "StartError"
    assert "No rank of the cluster" in reply.traceback
    assert_gone(cluster)
    kernel.ok("%distributed start -n 2")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["agent", "controller"])
def test_idle_agent_or_controller_loss_is_reported_by_the_next_cell(new_kernel: MakeKernel, who: str) -> None:
    kernel = new_kernel()
    cluster = start(kernel)
    kill(getattr(cluster, who))
    assert until(cluster.all_ended, timeout=LIMIT_S + KEEP_ALIVE_S)
    # The notebook may hear of it a little later.
    assert until(lambda: kernel.run("%distributed status").ename in ("NoClusterError", "ClusterLostError"))
    assert "Run `%distributed start -n 2`" in kernel.run("%distributed status").traceback
    kernel.ok("%distributed start -n 2")
    assert kernel.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]
    assert until(lambda: not cluster.folder.exists(), timeout=LIMIT_S)


@pytest.mark.slow
def test_killed_kernel_does_not_affect_another_notebook(new_kernel: MakeKernel) -> None:
    one, two = new_kernel(), new_kernel()
    first = start(one)
    two.ok("%load_ext axon_nb\n%distributed start -n 2 --name second")
    request = two.submit(f"%%distributed\n{BUSY.replace('600', '4')}\nprint('through')")
    two.wait_for_output(request, "go")
    one.kill()
    assert_gone(first)
    assert "[ranks 0-1] through" in two.collect(request).lines()
    assert two.ok("%%distributed\ndist.barrier()\nworld_size").lines() == ["[ranks 0-1] 2"]


def test_agent_and_controller_killed_at_once() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        cluster = footprint(kernel)
        assert len(cluster.processes) > 4, "the controller has a child"
        os.kill(cluster.agent, signal.SIGKILL)
        os.kill(cluster.controller, signal.SIGKILL)
        assert until(cluster.all_ended), [process for process in cluster.processes if not ended(process)]


def test_detached_processes_end_with_the_cluster() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok(f"%%distributed\n{DAEMON}")
        pids = kernel.value("list(__import__('axon_nb').current_cluster().pull('t_started').values())")
        started = [psutil.Process(pid) for pid in pids]
        started += [child for process in started for child in process.children()]
        kernel.ok("%distributed stop")
        assert until(lambda: all(map(ended, started))), started


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
