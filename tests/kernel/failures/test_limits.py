"""Limits of a rank's process: raised if possible, named when they are reached, and survived."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel

SUM = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item(), kept - rank"


@pytest.fixture(scope="module")
def gloo() -> Iterator[Kernel]:
    """A kernel that may open 1024 files, with 2 ranks on Gloo."""
    with Kernel(env={"AXON_NB_CPU_BACKEND": "gloo"}) as kernel:
        kernel.ok("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))")
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok("%%distributed\nimport os, resource, threading\nkept = rank")
        yield kernel


def test_rank_has_the_hard_open_file_limit(gloo: Kernel) -> None:
    reply = gloo.ok("%%distributed\nresource.getrlimit(resource.RLIMIT_NOFILE)")
    assert reply.lines() == ["[ranks 0-1] (4096, 4096)"]
    assert gloo.value("resource.getrlimit(resource.RLIMIT_NOFILE)") == (1024, 4096)


def test_rank_out_of_descriptors_reports_it_and_survives(gloo: Kernel) -> None:
    lower = "used = len(os.listdir('/proc/self/fd'))\nresource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, 4096))"
    gloo.ok(f"%%distributed --ranks 1\n{lower}")
    reply = gloo.run("%%distributed\ndist.new_group([0, 1])")
    assert "A process group of 2 ranks needs up to 20 more open files" in reply.traceback
    gloo.ok("%%distributed --ranks 1\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))")
    gloo.run("%distributed repair")  # refuses if the groups have been rebuilt already
    assert gloo.ok(f"%%distributed\ndist.new_group([0, 1])\n{SUM}").lines() == ["[ranks 0-1] (2.0, 0)"]


WAITS = {
    "Python": "dist.barrier()",
    "C++": "model(torch.ones(1, 4)).sum().backward()",
    "monitored_barrier": "dist.monitored_barrier()",
}


@pytest.mark.parametrize("where", WAITS)
def test_rank_survives_thread_exhaustion_in_a_failing_cell(gloo: Kernel, where: str) -> None:
    model = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))"
    gloo.ok(f"%%distributed\n{model}\nmodel(torch.ones(1, 4)).sum().backward()")
    # A stack of 32 TiB: the system refuses each new thread, as it does at a limit of processes.
    fails = "if rank == 0: raise ValueError('bug')\nold = threading.stack_size(2**45)"
    reply = gloo.run(f"%%distributed\n{fails}\n{WAITS[where]}")
    assert "ValueError: bug" in reply.traceback
    gloo.ok("%%distributed --ranks 1\nthreading.stack_size(old)")
    gloo.run("%distributed repair")  # refuses if the groups have been rebuilt already
    assert gloo.ok(f"%%distributed\n{SUM}").lines() == ["[ranks 0-1] (2.0, 0)"]
