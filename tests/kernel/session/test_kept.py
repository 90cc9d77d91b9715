"""Clusters that are kept without their kernel, and kernels that are replaced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint, until

MakeKernel = Callable[..., Kernel]

LINE = (
    "Reconnected to the cluster 'default' (2 ranks) that this notebook had left running. Its ranks hold kept, numbers."
)
TICKS = "import os, time\nprint('go', flush=True)\nwhile not os.path.exists('stop'): time.sleep(0.05)\nprint('ended')"

ROOT = Path(__file__).parents[3]

TESTS = """
import signal
import psutil
import pytest
from jupyter_client import BlockingKernelClient
from tests.support.processes import ended, footprint

SLEEP = "%%distributed{}\\nimport time\\nprint('asleep', flush=True)\\ntime.sleep(600)"
left = []

def works(kernel):
    assert all(map(ended, left)), "the earlier kernel and its cluster were killed"
    assert kernel.ok("%%distributed\\n1").lines() == ["[ranks 0-3] 1"]
    left[:] = [psutil.Process(kernel.pid), *footprint(kernel).processes]

@pytest.fixture
def asks_at_its_end(shared_kernel):
    yield
    shared_kernel.ok("1")

@pytest.fixture
def fails_to_end():
    yield
    raise ValueError("fails to end")

def test_start(monkeypatch, request):
    def fail(*_, **__):
        raise TimeoutError("fails to start")
    monkeypatch.setattr(BlockingKernelClient, "wait_for_ready", fail)
    request.getfixturevalue("kernel")

def test_background_cell(kernel):
    works(kernel)
    kernel.ok(SLEEP.format(" --noblock --out cell"))
    raise ValueError("leaves a cell in the background")

def test_cell(kernel, asks_at_its_end):
    works(kernel)
    signal.setitimer(signal.ITIMER_REAL, 11)  # pytest's limit for the test is near
    kernel.ok(SLEEP.format(""))

def test_teardown(kernel, fails_to_end):
    works(kernel)
    kernel.ok(SLEEP.format(" --noblock --out cell"))

def test_the_last_one(kernel):
    works(kernel)
"""
EXPECTED = [
    ("ERROR", "teardown", "ValueError: fails to end"),
    ("FAILED", "background_cell", "ValueError: leaves a cell in the background"),
    ("FAILED", "cell", "TimeoutError: this cell is not over after 1 s:"),
    ("FAILED", "start", "TimeoutError: fails to start"),
]
"""The summary's lines; a fixture that finds its kernel killed when it ends adds none."""


def leave(kernel: Kernel, cell: str = "") -> None:
    """Start two ranks with variables, restart the kernel, during `cell` if there is one, and load the extension."""
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    kernel.ok("%%distributed\nkept = rank + 10\nnumbers = torch.ones(3)")
    if cell:
        kernel.wait_for_output(kernel.submit(f"%%distributed\n{cell}"), "go", ranks=[0, 1])
    kernel.restart(now=True)
    kernel.ok("%load_ext axon_nb")


def test_cell_after_a_restart_runs_on_the_kept_ranks(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    leave(kernel)
    reply = kernel.ok("%%distributed\nkept")
    assert reply.lines()[0] == LINE
    assert sorted(reply.lines()[1:]) == ["[rank 0] 10", "[rank 1] 11"]
    assert kernel.ok("%%distributed\nnumbers.sum().item()").lines() == ["[ranks 0-1] 3.0"], "said once"


@pytest.mark.parametrize(
    "command", ["%distributed status", "%distributed stacks", "%distributed vars", "%pull kept", "%shards numbers"]
)
def test_commands_reconnect_to_kept_ranks(new_kernel: MakeKernel, command: str) -> None:
    kernel = new_kernel()
    leave(kernel)
    before = footprint_by_agent(kernel)
    assert kernel.ok(command).lines()[0] == LINE
    assert kernel.ok("%%distributed\nkept == rank + 10").lines() == ["[ranks 0-1] True"]
    assert before == sorted(footprint(kernel).ranks)


def footprint_by_agent(kernel: Kernel) -> list[int]:
    """The pids of the ranks that run, without reconnecting."""
    listed = "__import__('axon_nb.cluster.session.clusters', fromlist=['x']).own_detached()[0]"
    return sorted(kernel.value(f"[info['pid'] for info in {listed}.run_dir.read_info()['rank_info']]"))


def test_cell_waits_for_the_running_one_and_shows_its_output(new_kernel: MakeKernel, tmp_path: Path) -> None:
    kernel = new_kernel()
    leave(kernel, TICKS)
    request = kernel.submit("%%distributed\nkept - rank")
    kernel.wait_for_output(request, "Queued behind the cell that is running on ranks 0-1.")
    (tmp_path / "stop").touch()
    reply = kernel.collect(request)
    assert reply.ok
    assert LINE in reply.lines()
    kernel.follow(request, reply, until=lambda: "is done" in reply.stdout)
    assert "Cell In[3] is still running on ranks 0-1. Its output continues here." in reply.lines()
    assert {"[ranks 0-1] ended", "[ranks 0-1] 10"} <= set(reply.lines())


def test_start_is_rejected_while_kept_ranks_run_a_cell(new_kernel: MakeKernel, tmp_path: Path) -> None:
    kernel = new_kernel()
    leave(kernel, TICKS)
    before = footprint_by_agent(kernel)
    refused = kernel.run("%distributed start -n 2")
    assert refused.ename == "UsageError"
    assert "A cell is still running on ranks 0-1 of the cluster 'default'" in refused.traceback
    assert "`%distributed attach` to get it back, or `%distributed start --force` to stop it" in refused.traceback
    assert footprint_by_agent(kernel) == before
    reply = kernel.ok("%distributed start -n 2 --force")
    assert reply.lines() == ["Stopped the cluster 'default' (2 ranks) that this notebook had left running."]
    assert not set(footprint(kernel).ranks) & set(before)


def test_stop_ends_kept_ranks_and_commands_report_no_cluster(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    leave(kernel)
    stopped = kernel.ok("%distributed stop")
    assert stopped.lines() == ["Stopped the cluster 'default' (2 ranks) that this notebook had left running."]
    assert "needs a cluster, but none is running" in kernel.run("%distributed status").evalue


def test_no_cluster_message_names_ranks_of_another_kernel(new_kernel: MakeKernel) -> None:
    one, two = new_kernel(), new_kernel()
    one.ok("%load_ext axon_nb\n%distributed start -n 2 --name alpha")
    one.kill()
    two.ok("%load_ext axon_nb")
    hint = "'alpha' (2 ranks). Run `%distributed attach alpha` to reconnect."
    assert until(lambda: hint in two.run("%distributed status").evalue)
    assert hint.partition(".")[0] in two.run("%pull x").evalue
    two.ok("%distributed attach alpha\n%distributed stop")


@pytest.mark.timeout(600)
def test_shared_kernel_is_replaced_after_a_failed_test(tmp_path: Path) -> None:
    file = tmp_path / "test_shared.py"
    file.write_text(TESTS)
    plugins = [f"-p{name}" for name in ("no:cacheprovider", "no:xdist", "tests.conftest", "tests.kernel.conftest")]
    options = ["-c", str(ROOT / "pyproject.toml"), "-q", "-rfE"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, str(file)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    said = re.findall(r"^(FAILED|ERROR) \S*::test_(\w+) - (.*)$", done.stdout, re.MULTILINE)
    said = [(kind, test, re.sub(r"after \d+ s", "after 1 s", reason)) for kind, test, reason in said]
    assert sorted(said) == EXPECTED, done.stdout + done.stderr
    assert "2 passed" in done.stdout, done.stdout
    assert "left running" not in done.stdout, done.stdout
