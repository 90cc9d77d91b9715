"""After a kill of any process: it is told where there is a notebook, nothing is left, and `start` works again."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel.driver import Kernel
from tests.kernel.processes import Footprint, footprint, until

MakeKernel = Callable[..., Kernel]

LIMIT_S = 10.0
"""Beyond the keep-alive time nothing of a cluster may be left after this."""
KEEP_ALIVE_S = 1.0

BUSY = "import time\nprint('go', flush=True)\ntime.sleep(600)"


def start(kernel: Kernel, n: int = 2) -> Footprint:
    kernel.ok(f"%load_ext axon_nb\n%distributed config keep_alive={KEEP_ALIVE_S:g}")
    kernel.ok(f"%distributed start -n {n}")
    return footprint(kernel)


def shared_memory() -> set[str]:
    """Names of the shared-memory blocks of this user."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if path.lstat().st_uid == os.getuid()} if folder.exists() else set()


def assert_gone(cluster: Footprint) -> None:
    assert until(cluster.gone, timeout=KEEP_ALIVE_S + LIMIT_S), (
        cluster.folder.exists(),
        [process for process in cluster.processes if process.is_running()],
    )


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_start_works_after_the_kernel_the_agent_and_both_were_killed(new_kernel: MakeKernel) -> None:
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
    assert until(lambda: not any(process.is_running() for process in cluster.processes), timeout=LIMIT_S + KEEP_ALIVE_S)
    kernel.ok("__import__('axon_nb.cluster.kept', fromlist=['x']).running()")
    assert until(lambda: not cluster.folder.exists(), timeout=LIMIT_S)


def test_a_kernel_killed_during_a_cell_that_allocates_shared_memory(new_kernel: MakeKernel) -> None:
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
    assert until(lambda: not shared_memory() - before, timeout=LIMIT_S), shared_memory() - before


def test_a_kernel_shut_down_during_a_cell(new_kernel: MakeKernel) -> None:
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
def test_a_kernel_killed_while_it_starts_a_cluster(base: Path, new_kernel: MakeKernel) -> None:
    kernel = new_kernel(AXON_NB_RUNTIME_DIR=str(base), AXON_NB_WARM_UP="0")
    kernel.ok("%load_ext axon_nb")
    for moment in ("agent.sock", "profile/security/ipcontroller-client.json", "profile/log/rank0.log"):
        kernel.submit("%distributed start -n 2")
        assert until(lambda moment=moment: list(base.glob(f"*/*/{moment}"))), moment
        kernel.come_back()
        assert until(lambda: not list(base.glob("*/*")), timeout=30), (moment, list(base.glob("*/*")))
        kernel.ok("%load_ext axon_nb")
    kernel.ok("%distributed start -n 2")
    assert kernel.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]


def test_ranks_killed_one_after_the_other_are_named_and_the_rest_goes_on(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    cluster = start(kernel, 3)
    for rank in range(2):
        request = kernel.submit(f"%%distributed --ranks {rank}-2\n{BUSY}")
        kernel.wait_for_output(request, "go")
        kill(cluster.ranks[rank])
        reply = kernel.collect(request, timeout=30)
        assert reply.ename == "CellError"
        assert f"rank {rank} was killed by SIGKILL" in reply.traceback
        assert "`%distributed repair`" in reply.traceback
    assert kernel.ok("%%distributed --ranks 2\n'still here'").lines() == ["[rank 2] 'still here'"]
    kill(cluster.ranks[2])
    assert until(lambda: "rank 2 was killed" in kernel.run("%%distributed --ranks 2\n1").traceback)
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
    assert until(lambda: not any(p.is_running() for p in cluster.processes if p.pid in cluster.ranks))
    kernel.ok("%load_ext axon_nb")
    reply = kernel.run("%distributed attach")
    assert reply.ename == "StartError"
    assert "had no rank left" in reply.traceback
    assert_gone(cluster)
    kernel.ok("%distributed start -n 2")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["agent", "controller"])
def test_idle_loss_of_the_agent_or_controller_is_said_by_the_next_cell(new_kernel: MakeKernel, who: str) -> None:
    kernel = new_kernel()
    cluster = start(kernel)
    kill(getattr(cluster, who))
    assert until(lambda: not any(process.is_running() for process in cluster.processes), timeout=LIMIT_S)
    reply = kernel.run("%distributed status")
    assert reply.ename in ("NoCluster", "ClusterGone")
    assert "`%distributed start`" in reply.traceback
    kernel.ok("%distributed start -n 2")
    assert kernel.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]
    assert until(lambda: not cluster.folder.exists(), timeout=LIMIT_S)


@pytest.mark.slow
def test_the_kernel_of_one_notebook_is_killed_and_the_other_goes_on(new_kernel: MakeKernel) -> None:
    one, two = new_kernel(), new_kernel()
    first = start(one)
    two.ok("%load_ext axon_nb\n%distributed start -n 2 --name second")
    request = two.submit(f"%%distributed\n{BUSY.replace('600', '4')}\nprint('through')")
    two.wait_for_output(request, "go")
    one.kill()
    assert_gone(first)
    assert "[ranks 0-1] through" in two.collect(request).lines()
    assert two.ok("%%distributed\ndist.barrier()\nworld_size").lines() == ["[ranks 0-1] 2"]
