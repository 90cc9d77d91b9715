"""The Python API, from plain programs and in the tests of a project: each test runs a script of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cell_output import by_rank
from tests.support.processes import until

pytestmark = pytest.mark.timeout(600)

CONFTEST = """
from axon_nb.testing import ranks
two_ranks = ranks(2, devices="cpu")
"""

HELPER = """
def doubled(x):
    return 2 * x
"""

TESTS = """
import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import axon_nb
from helper import doubled

SCALE = 10


def add(value):
    total = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(total)
    return doubled(total) * SCALE


def as_in_courses(rank, size, folder):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    (folder / str(rank)).write_text(str(total.item()))
    dist.destroy_process_group()


def test_function_runs_on_every_rank(two_ranks):
    first, second = two_ranks.run(add, 3)
    assert first.tolist() == second.tolist() == [140.0]


def test_closure_runs_on_every_rank(two_ranks):
    offset = 5
    assert two_ranks.run(lambda: dist.get_rank() + offset) == [5, 6]


def test_failure_fails_this_test_alone(two_ranks):
    def fail():
        if dist.get_rank() == 1:
            raise ValueError("only here")
        dist.barrier()

    with pytest.raises(axon_nb.CellError, match="only here"):
        two_ranks.run(fail)


def test_dead_rank_is_replaced(two_ranks):
    def die():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(axon_nb.CellError, match="SIGKILL"):
        two_ranks.run(die)
    assert two_ranks.run(add, 0)[1].tolist() == [20.0]


def test_spawn_uses_warm_ranks(two_ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(mp, "spawn", two_ranks.spawn)
    mp.spawn(as_in_courses, args=(2, tmp_path), nprocs=2, join=True)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2.0", "2.0"]
    with pytest.raises(axon_nb.UsageError, match="nprocs must be 2"):
        mp.spawn(as_in_courses, args=(4, tmp_path), nprocs=4)
"""


def run_script(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a program with `axon_nb` imported; its runtime folder is `folder`/r."""
    (folder / "r").mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(f"import axon_nb\n{body}")
    env = {**os.environ, "AXON_NB_RUNTIME_DIR": str(folder / "r")}
    return subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path, as Unix sockets want it."""
    return tmp_path_factory.mktemp("a", numbered=True)


def leftovers(folder: Path) -> list[str]:
    """What stays in the runtime folder."""

    def there() -> list[str]:
        return [str(path) for path in (folder / "r").glob("*/*")]

    until(lambda: not there())
    return there()


def test_run_push_pull_status_and_stop(folder: Path) -> None:
    done = run_script(
        folder,
        """
with axon_nb.start(2) as cluster:
    result = cluster.run("print('hello', rank); x = torch.ones(1) * rank; dist.all_reduce(x); x.item()")
    print(dict(result.values), result.ok, result[1], result.text[0].strip())
    cluster.push({"y": [1, 2]}, ranks=[1])
    print(cluster.pull("y", ranks=1), cluster.pull("rank * 3"))
    print(list(cluster.status().columns))
    failed = cluster.run("1 / rank", check=False, quiet=True)
    print(failed.ok, failed.errors[0].ename, dict(failed.values))
    print(dict(cluster.run_noblock("rank + 10").result(100).values))
    try:
        axon_nb.start(2)
    except axon_nb.UsageError as error:
        print("UsageError", str(error)[:40])
cluster.stop()
try:
    cluster.run("1")
except axon_nb.ClusterLostError as error:
    print("gone:", error)
""",
    )
    assert done.stderr == ""
    assert by_rank(done.stdout) == {0: ["hello 0"], 1: ["hello 1"]}
    assert done.stdout.splitlines()[2:] == [
        "{0: 1.0, 1: 1.0} True 1.0 hello 0",
        "[1, 2] {0: 0, 1: 3}",
        "['rank', 'host', 'pid', 'device', 'backend', 'state', 'memory', 'device_memory', 'cell']",
        "False ZeroDivisionError {1: 1.0}",
        "{0: 10, 1: 11}",
        "UsageError The cluster 'default' with 2 ranks is ru",
        "gone: The cluster 'default' was stopped. Run `%distributed start` to start a new one.",
    ]
    assert leftovers(folder) == []


def test_failed_program_leaves_no_processes(folder: Path) -> None:
    done = run_script(folder, "cluster = axon_nb.start(2)\nraise SystemExit('on purpose')")
    assert done.returncode == 1
    assert "on purpose" in done.stderr
    assert leftovers(folder) == []


@pytest.mark.slow
def test_other_launchers_work_too(folder: Path) -> None:
    done = run_script(
        folder,
        """
import contextlib, os, pathlib
cluster = axon_nb.start(2, engines="local")
print(dict(cluster.run("t = torch.ones(1); dist.all_reduce(t); (rank, local_rank, t.item())").values))
files = [p for p in pathlib.Path(os.environ["AXON_NB_RUNTIME_DIR"]).rglob("*") if p.is_file()]
modes = {}
for p in files:
    with contextlib.suppress(FileNotFoundError):  # a draft that has its name by now
        modes[p.name] = p.stat().st_mode
print([name for name, mode in modes.items() if mode & 0o077])
try:
    cluster.run("if rank == 1: raise ValueError('bug')\\ndist.barrier()")
except axon_nb.CellError as error:
    print(error)
print(dict(cluster.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values))
try:
    cluster.run("import os, signal\\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
except axon_nb.CellError as error:
    print(error)
cluster.stop()
""",
    )
    assert done.stdout.splitlines() == [
        "{0: (0, 0, 2.0), 1: (1, 1, 2.0)}",
        "[]",
        "rank 1: ValueError: bug",
        "{0: 2.0, 1: 2.0}",
        "rank 1 disconnected (its engine unregistered)",
    ]
    assert leftovers(folder) == []


def test_ipyparallel_knows_the_launcher_by_name(folder: Path) -> None:
    done = run_script(
        folder,
        """
import ipyparallel as ipp
cluster = ipp.Cluster(n=2, engines="axon", log_level=40)
client = cluster.start_and_connect_sync(activate=False)
print(client.ids, client[:].apply_sync(lambda: 6 * 7))
cluster.stop_cluster_sync()
""",
    )
    assert done.stdout.splitlines() == ["[0, 1] [42, 42]"]
    assert leftovers(folder) == []


def test_tests_of_a_project_run_on_warm_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("p")
    for name, text in {"conftest.py": CONFTEST, "helper.py": HELPER, "test_it.py": TESTS}.items():
        (folder / name).write_text(text)
    env = {**os.environ, "AXON_NB_RUNTIME_DIR": str(tmp_path_factory.mktemp("r"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert "5 passed" in done.stdout, done.stdout + done.stderr
