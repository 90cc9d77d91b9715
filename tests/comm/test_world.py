"""World.init from the environment of each launcher, in plain scripts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from axon_nb.comm import CommError, DeadlockError, World
from axon_nb.comm.world import torchrun_environment
from tests.support.processes import free_port

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 400

SCRIPT = """
import sys
import torch
from axon_nb import comm
from axon_nb.prelude import World, all_reduce_sum

world = World.init()
total = all_reduce_sum(torch.tensor([float(world.rank() + 1)]))
who = f"rank {world.rank()} of {world.world_size()} local {world.local_rank}"
sys.stdout.write(f"{who} total {total.item()} {world}\\n")
world.close()
try:
    world.rank()
except comm.WorldClosedError as error:
    sys.stdout.write(f"{error}\\n")
assert "IPython" not in sys.modules and "ipyparallel" not in sys.modules
"""


def _run(command: list[str], tmp_path: Path, **changes: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [*command, str(script)],
        env={**env, "OMP_NUM_THREADS": "1", **changes},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line)


CLOSED = "The world is closed: call `World.init()` to create a new one."
RANKS = [
    f"rank {rank} of 2 local {rank} total 3.0 World(rank={rank}, world_size=2, backend='gloo')" for rank in range(2)
]


def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert _run(command, tmp_path) == [CLOSED, CLOSED, *RANKS]


def test_world_destroyed_by_torch_exits_cleanly(tmp_path: Path) -> None:
    (tmp_path / "destroys.py").write_text(
        "import torch, torch.distributed as dist\nfrom axon_nb import comm\nworld = comm.World.init()\n"
        "comm.all_reduce_sum(torch.ones(1))\ndist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(tmp_path / "destroys.py")], capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="needs mpiexec, such as Open MPI's")
def test_under_mpiexec(tmp_path: Path) -> None:
    changes = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "MASTER_PORT": str(free_port()),
    }
    assert _run(["mpiexec", "-n", "2", sys.executable], tmp_path, **changes) == [CLOSED, CLOSED, *RANKS]


def test_without_a_launcher_the_error_names_the_alternatives(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("from axon_nb.comm import World\nWorld.init()")
    env = {name: value for name, value in os.environ.items() if "RANK" not in name and "SLURM" not in name}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert "run this in a `%%distributed` cell or under torchrun, mpirun or srun" in done.stderr


@pytest.mark.skipif(shutil.which("mpiexec.openmpi") is None, reason="needs Open MPI")
def test_open_mpi_over_hosts_needs_the_address_of_rank_0(tmp_path: Path) -> None:
    agent = tmp_path / "agent"  # for ssh: both hosts are this one
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o700)
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    hosts = ["--host", f"{socket.gethostname()}:2,127.0.0.2:1", "--mca", "plm_rsh_agent", str(agent), "--oversubscribe"]
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    command = ["mpiexec.openmpi", *hosts, "-n", "3", sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    for answer in done.stdout.splitlines():
        given = json.loads(answer)
        here = 1 if given["OMPI_COMM_WORLD_RANK"] == "2" else 2
        with pytest.raises(CommError, match=f"{here} of 3 ranks run on this host.*set MASTER_ADDR to it"):
            torchrun_environment(given)
        found = torchrun_environment({**given, "MASTER_ADDR": "n1"})
        assert found is not None
        assert (found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == (str(here), "n1")


STEP = {"SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("tasks", "node", "size"),
    [
        ("2(x2),1", 0, 2),
        ("2(x2),1", 1, 2),
        ("2(x2),1", 2, 1),
        ("3", 0, 3),
        ("1,10(x3),2", 3, 10),
        ("1,10(x3),2", 4, 2),
        ("4(x2)", None, 4),
    ],
)
def test_number_of_ranks_on_a_slurm_node(tasks: str, node: int | None, size: int) -> None:
    given = {**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_TASKS_PER_NODE": "9", "SLURM_JOB_NODELIST": "n1"}
    found = torchrun_environment(given if node is None else {**given, "SLURM_NODEID": str(node)})
    assert found is not None
    assert found["LOCAL_WORLD_SIZE"] == str(size)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[2,10]", "n2"),
        ("n[1-3,7],m2-gpu[01-02]", "n1"),
        ("m2-gpu[01-02],n1", "m2-gpu01"),
        ("login,n[1-3]", "login"),
        ("r[1-2]n[03-04]", "r1n03"),
        ("n[007]-ib.site", "n007-ib.site"),
    ],
)
def test_first_host_of_a_slurm_step(nodes: str, first: str) -> None:
    given = {**STEP, "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_NODELIST": "other[1-2]"}
    found = torchrun_environment(given)
    assert found is not None
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == (first, "29500")


def test_intel_variables_are_read() -> None:
    intel = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}
    found = torchrun_environment(intel)
    assert found is not None
    assert " ".join(found[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")) == "1 1 10.0.0.1 7"
    assert torchrun_environment({"HOME": "/"}) is None


def test_synchronous_send_waits_for_its_receiver() -> None:
    def all_send_first(world: World) -> float:
        tensor = torch.tensor(float(world.rank()))
        dist.send(tensor, (world.rank() + 1) % 2)
        dist.recv(tensor, (world.rank() + 1) % 2)
        return tensor.item()

    assert World.mock(2).run(all_send_first) == [1.0, 0.0]
    with pytest.raises(DeadlockError, match=r"rank 0 is waiting in send to rank 1; rank 1 .* in send to rank 0"):
        World.mock(2, synchronous_sends=True).run(all_send_first)

    def exchange(world: World) -> float:
        tensor, other = torch.tensor(float(world.rank())), (world.rank() + 1) % 2
        received = torch.empty(())
        sending = dist.isend(tensor, other)
        dist.recv(received, other)
        sending.wait()
        return received.item()

    assert World.mock(2, synchronous_sends=True).run(exchange) == [1.0, 0.0]
