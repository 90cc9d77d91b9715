"""`--hosts slurm`: a real Slurm with two nodes on this machine starts the agents, from outside and inside a job."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from axon_nb.comm.world import torchrun_environment
from tests.support.processes import until
from tests.support.script import Script, command_lines, family

NODES = ("node1", "node2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "scontrol", "squeue")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_START_TIMEOUT_S = 60.0

CELL = "import os; t = torch.ones(1); dist.all_reduce(t); (os.environ.get('AXON_NB_HOST', ''), t.item())"

KEPT = "import os; t = torch.ones(1); dist.all_reduce(t); (os.environ['AXON_NB_HOST'], globals().get('kept'), t.item())"


def why_no_slurm() -> str:
    """Why there can be no Slurm here; empty when there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"needs {', '.join(missing)}: Debian's slurm-wlm and munge"
    return "" if os.getuid() == 0 else "needs root, for slurmd"


@dataclass(frozen=True)
class Slurm:
    """A running Slurm."""

    environment: dict[str, str]
    """With it, Slurm's commands find this one."""

    def run(self, *command: str) -> str:
        """Run a command and return what it prints."""
        env = {**os.environ, **self.environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=230)
        return done.stdout.strip()

    @contextlib.contextmanager
    def job(self, nodes: int) -> Iterator[str]:
        """Hold an allocation of this many nodes; its number."""
        env = {**os.environ, **self.environment}
        command = ["salloc", f"--nodes={nodes}", "--no-shell", "--job-name=held"]
        subprocess.run(command, env=env, capture_output=True, check=True, timeout=60)
        number = self.run("squeue", "--noheader", "--name=held", "--states=RUNNING", "--format=%A").split()[-1]
        try:
            yield number
        finally:
            self.run("scancel", number)
            assert until(lambda: not self.run("squeue", "--noheader", f"--jobs={number}"))


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [server.getsockname()[1] for server in servers]


@contextlib.contextmanager
def serve_slurm(folder: Path) -> Iterator[Slurm]:
    """Run Slurm, for as long as it lasts."""
    ports = _free_ports(1 + len(NODES))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    munge = folder / "munge.sock"
    nodes = "".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN\n"
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    (folder / "slurm.conf").write_text(
        f"ClusterName=axon\nSlurmctldHost={socket.gethostname()}(127.0.0.1)\nSlurmctldPort={ports[0]}\n"
        f"SlurmUser=root\nAuthType=auth/munge\nAuthInfo=socket={munge}\nCredType=cred/munge\n"
        f"ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nReturnToService=2\nMpiDefault=none\n"
        f"SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nSlurmctldTimeout=30\nSlurmdTimeout=60\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool.%n\n"
        f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid\n"
        f"{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    )
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    env = {**os.environ, **environment, "PATH": _PATH}
    files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={munge}", f"--key-file={folder}/munge.key", *files],
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-N", name] for name in NODES),
    ]
    slurm = Slurm(environment)
    with contextlib.ExitStack() as stack:
        for index, command in enumerate(commands):
            log = stack.enter_context(open(folder / f"{index}.log", "wb"))
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            if index == 0:
                assert until(munge.exists), (folder / "0.log").read_text()
        end = time.monotonic() + _START_TIMEOUT_S
        while _states(slurm) != ["idle"] * len(NODES):
            assert time.monotonic() < end, "\n".join((folder / f"{index}.log").read_text() for index in range(4))
            time.sleep(0.2)
        yield slurm


def _states(slurm: Slurm) -> list[str]:
    try:
        return slurm.run("sinfo", "--noheader", "--Node", "--format=%t").split()
    except subprocess.CalledProcessError:
        return []


def _kept(*ranks: int) -> dict[int, tuple[str, int | None, float]]:
    """What `KEPT` gives when these ranks have kept their variable."""
    return {rank: (NODES[rank // 2], rank if rank in ranks else None, 4.0) for rank in range(4)}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm with two nodes."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    with serve_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.mark.timeout(480)
def test_job_runs_the_ranks_of_a_notebook_outside_it_and_repairs_them(slurm: Slurm, tmp_path: Path) -> None:
    with slurm.job(2) as number, Script(tmp_path, **slurm.environment) as script:
        script.ok(f"import axon_nb\nc = axon_nb.start(4, hosts='slurm:{number}', devices='cpu')", timeout=230)
        key = script.value("c.connection.client.session.key.decode()")
        assert not [line for line in command_lines(family(script.mark)) if key in line]
        values = script.value(f"dict(c.run({CELL!r}).values)")
        assert values == {rank: (NODES[rank // 2], 4.0) for rank in range(4)}
        script.ok("c.run('kept = rank')")
        answer = script.run("c.run('import os\\nif rank == 2: os.kill(os.getpid(), 9)\\ndist.barrier()')")
        assert answer.message.startswith(f"rank 2 was killed by SIGKILL on the host {NODES[1]!r}")
        script.ok("c.repair()")
        assert script.value(f"dict(c.run({KEPT!r}).values)") == _kept(0, 1, 3)
        cell = "import os, time\nif rank == 3:\n    os.kill(os.getppid(), 9); time.sleep(60)\ndist.barrier()"
        assert f"lost with its host {NODES[1]!r}" in script.run(f"c.run({cell!r})").message
        assert script.value("dict(c.run('rank', ranks='0-1').values)") == {0: 0, 1: 1}
        script.ok("c.repair()")  # a new step of the job starts the agent again
        assert script.value(f"dict(c.run({KEPT!r}).values)") == _kept(0, 1)
        script.ok("c.stop()")
        assert until(lambda: not script.others()), command_lines(script.others())
        assert until(lambda: number not in slurm.run("squeue", "--steps", "--noheader", "--format=%i"))


def test_notebook_in_a_job_has_ranks_on_its_other_nodes(slurm: Slurm) -> None:
    code = (
        f"import axon_nb\nc = axon_nb.start(3, hosts='slurm', devices='cpu')\nprint(dict(c.run({CELL!r}).values))\n"
        "c.stop()"
    )
    with slurm.job(2) as number:
        step = ["srun", f"--jobid={number}", "--overlap", f"--nodelist={NODES[0]}", "--nodes=1", "--ntasks=1"]
        out = slurm.run(*step, sys.executable, "-c", code)
        assert str({0: ("", 3.0), 1: ("", 3.0), 2: (NODES[1], 3.0)}) in out
        assert until(lambda: number not in slurm.run("squeue", "--steps", "--noheader", "--format=%i"))


def test_job_that_cannot_run_ranks_is_refused_with_the_fix(slurm: Slurm, tmp_path: Path) -> None:
    with slurm.job(1) as number, Script(tmp_path, **slurm.environment) as script:
        script.ok("import axon_nb")

        def refusal(hosts: str) -> str:
            answer = script.run(f"axon_nb.start(2, hosts={hosts!r}, devices='cpu')")
            assert answer.kinds[0] == "UsageError"
            return answer.message

        assert "name a job with `--hosts slurm:JOB`; `squeue --me` lists yours." in refusal("slurm")
        assert refusal("slurm:999999") == (
            "Slurm cannot show the job 999999 (slurm_load_jobs error: Invalid job id specified): `squeue --me` lists "
            "yours."
        )
        script.ok(f"import os\nos.environ.update(SLURM_JOB_ID={number!r}, SLURMD_NODENAME={NODES[0]!r})")
        assert refusal("slurm") == (
            f"The Slurm job {number} has no node besides this one: leave out `--hosts`, or allocate more nodes."
        )
        assert not script.others()


IDENTITY = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
VARIABLES = "import json, os; print(json.dumps(dict(os.environ)))"


def test_ranks_of_a_step_know_their_host_and_that_of_rank_0(slurm: Slurm) -> None:
    def started(*options: str) -> list[str]:
        answers = slurm.run("srun", *options, sys.executable, "-c", VARIABLES).splitlines()
        found = [torchrun_environment(json.loads(answer)) or {} for answer in answers]
        return sorted(" ".join(values[name] for name in IDENTITY) for values in found)

    first, second = NODES
    assert started("-N2", "-n3") == [f"0 0 2 {first}", f"1 1 2 {first}", f"2 0 1 {first}"]
    with slurm.job(2) as number:
        assert started(f"--jobid={number}", "--overlap", "-N1", "-n1", f"--nodelist={second}") == [f"0 0 1 {second}"]
