"""A real Slurm with two nodes on this machine: munged, slurmctld and two slurmd, with files and ports of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import until

NODES = ("node1", "node2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "scontrol", "squeue")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_START_TIMEOUT_S = 60.0


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
