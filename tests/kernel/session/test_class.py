"""A class on one machine: thirty notebooks start two ranks each at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest
from jupyter_core.utils import ensure_event_loop

from tests.support.kernel import Kernel
from tests.support.processes import ended, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

LEARNERS = 30
SUM = "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


@pytest.fixture
def classroom() -> Iterator[list[Kernel]]:
    """Kernels as a teacher sets them up."""
    with ExitStack() as stack:
        yield [stack.enter_context(Kernel(env={"AXON_NB_CLASS": "1"})) for _ in range(LEARNERS)]


def test_thirty_notebooks_start_ranks_at_once(classroom: list[Kernel]) -> None:
    began = time.monotonic()

    def learn(kernel: Kernel) -> float:
        kernel.ok("%load_ext axon_nb")
        kernel.collect(kernel.submit("%distributed start -n 2"), timeout=900)
        assert kernel.ok(SUM).lines() == ["[ranks 0-1] 2.0"]
        ensure_event_loop().close()  # jupyter_client has made one for this thread
        return time.monotonic() - began

    with ThreadPoolExecutor(LEARNERS) as pool:
        ready = sorted(pool.map(learn, classroom))
    processes = [process for kernel in classroom for process in _family(kernel)]
    started = [process for process in processes if "axon_nb" in " ".join(process.cmdline())]
    assert len(started) >= 4 * LEARNERS  # an agent, a controller and two ranks each
    used = [process.memory_full_info() for process in processes]
    print(
        f"{LEARNERS} notebooks with 2 ranks each: the first was ready after {ready[0]:.0f} s, the last after "
        f"{ready[-1]:.0f} s; {len(processes)} processes, {sum(one.pss for one in used) / 2**30:.1f} GiB (PSS), "
        f"{sum(process.num_fds() for process in processes)} open files, "
        f"{sum(process.num_threads() for process in processes)} threads"
    )
    for kernel in classroom:
        assert kernel.ok(SUM).lines() == ["[ranks 0-1] 2.0"]
    for kernel in classroom:
        kernel.ok("%distributed stop")
    assert until(lambda: all(map(ended, started)))


def _family(kernel: Kernel) -> list[psutil.Process]:
    own = psutil.Process(kernel.pid)
    return [own, *own.children(recursive=True)]
