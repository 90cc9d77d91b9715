"""`axon_nb.testing.ranks`: the tests of a project run on warm ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
