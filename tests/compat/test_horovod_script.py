"""A published script's shape under torchrun; alone; and when a rank fails half-way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/compat/horovod_digits.py"
LIMIT_S = 400

pytestmark = pytest.mark.timeout(600)

FAILING = """
import torch
import axon_nb.compat.horovod as hvd
hvd.init()
hvd.allreduce(torch.ones(100))
if hvd.rank() == 1:
    raise ValueError("a bug of the user's")
hvd.allreduce(torch.ones(3))
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


@pytest.mark.slow
def test_script_trains_under_torchrun() -> None:
    run = torchrun(SCRIPT, "--epochs=2")
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    weights = [line for line in lines if line.startswith("weights ")]
    assert len(weights) == 2
    assert len(set(weights)) == 1
    accuracies = [float(line.rpartition(" ")[2].rstrip("%")) for line in lines if line.startswith("Test set")]
    assert accuracies[-1] > 70


@pytest.mark.slow
def test_failed_rank_ends_the_torchrun_job(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    run = torchrun(str(script))
    assert run.returncode != 0
    assert "a bug of the user's" in run.stderr


def test_single_process_is_a_world_of_one() -> None:
    code = (
        "import torch, axon_nb.compat.horovod as hvd\nhvd.init()\nprint(hvd.rank(), hvd.size(), hvd.local_rank())\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())\n"
        "hvd.broadcast_parameters(model.state_dict(), 0)\nmodel(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n"
        "print(hvd.allreduce(torch.tensor([2.0])).item(), hvd.broadcast_object('x'), hvd.join())"
    )
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert (run.returncode, run.stdout.splitlines()) == (0, ["0 1 0", "2.0 x 0"]), run.stderr
