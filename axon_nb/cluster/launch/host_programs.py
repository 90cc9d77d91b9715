"""The programs that start the agents of other hosts: `ssh`, once per host, and `srun` or `mpiexec`, once for all.

Each runs `axon-nb host --join` on the other hosts. That reads the cluster's key from standard input, or from the
environment with `mpiexec`, which gives its input to one process: the key is in no command line.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ipyparallel.cluster.launcher import SSHEngineSetLauncher
from IPython.paths import get_ipython_dir
from traitlets.config import Config
from traitlets.config.loader import ConfigFileNotFound, PyFileConfigLoader

from axon_nb.errors import StartError, UsageError
from axon_nb.records.environment import JOIN_KEY, SLURM_JOB, SLURM_NODE

_QUERY_TIMEOUT_S = 20.0
# The first value of an option holds: what the user configured comes before these. Passwords cannot be asked for. A
# connection that other programs may use would outlive the cluster.
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ControlMaster=no", "RequestTTY=no")


_WITHOUT_SIGINT = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
"""Command that runs another: Jupyter's stop button signals the kernel's whole process group."""


def ssh_launcher() -> SSHEngineSetLauncher:
    """Return ipyparallel's launcher, for what the user configured, such as its hosts.

    The configuration is in `ipcluster_config.py` of IPython's default profile, where ipyparallel looks, too. Unless it
    says otherwise, `ssh` runs this Python on the other hosts.
    """
    try:
        folder = str(Path(get_ipython_dir()) / "profile_default")
        config = PyFileConfigLoader("ipcluster_config.py", path=folder).load_config()
    except ConfigFileNotFound:
        config = Config()
    ssh = config.SSHLauncher
    ssh.setdefault("remote_python", sys.executable)
    for name, usual in (("ssh_cmd", ["ssh"]), ("scp_cmd", ["scp"])):
        ssh[name] = [*_WITHOUT_SIGINT, *ssh.get(name, usual)]
    return SSHEngineSetLauncher(config=config)


def configured_hosts() -> dict[str, int]:
    """Return how many ranks each host gets according to ipyparallel's `c.SSHEngineSetLauncher.engines`.

    Raises:
        UsageError: it lists no host, or a name that is not one.
    """
    hosts = {
        name: int(one.get("n", 1) if isinstance(one, dict) else one) for name, one in ssh_launcher().engines.items()
    }
    if not hosts:
        raise UsageError(
            "--hosts ssh uses the hosts of `c.SSHEngineSetLauncher.engines` in ipcluster_config.py, which lists none: "
            "use `--hosts ssh:NAME`."
        )
    for name in hosts:
        if "-" in (name[:1], name.rpartition("@")[2][:1]):  # ssh would take it as an option
            raise UsageError(f"`c.SSHEngineSetLauncher.engines` lists {name!r}, which is not a host name: correct it.")
    return hosts


def ssh_address(host: str) -> str:
    """Return the host name or address that ssh's configuration gives for a name."""
    launcher = ssh_launcher()
    shown = _output([*launcher.ssh_cmd, *launcher.ssh_args, "-G", "--", host])
    names = [line.partition(" ")[2] for line in shown.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.rpartition("@")[2]


def ssh_command(host: str, address: str) -> tuple[list[str], str]:
    """Return the command line that starts the agent of a host over ssh, and the Python that it runs there.

    Args:
        host: The host, as ssh knows it.
        address: Where agents join, ``ip:port``.
    """
    launcher = ssh_launcher()
    options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
    user = ["-l", launcher.user] if launcher.user and "@" not in host else []
    program = shlex.join(_join_command(launcher.remote_python, address, "--read-key", "--name", host))
    return [*launcher.ssh_cmd, *launcher.ssh_args, *options, *user, "--", host, program], launcher.remote_python


def srun_command(job: str, nodes: Sequence[str], address: str) -> tuple[list[str], str]:
    """Return the command line that starts an agent on each of these nodes, and the Python that it runs there.

    Args:
        job: Number of the job.
        nodes: Those of its nodes that get an agent.
        address: Where agents join, ``ip:port``.
    """
    number = f"{len(nodes)}"
    return [
        "srun",
        f"--jobid={job}",
        "--overlap",  # the notebook may be a step of the same job
        f"--nodelist={','.join(nodes)}",
        f"--nodes={number}",
        f"--ntasks={number}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--mpi=none",
        "--unbuffered",
        "--kill-on-bad-exit=0",  # the agents of other nodes stay when one exits
        *_join_command(sys.executable, address, "--read-key"),
    ], sys.executable


def mpi_command(hosts: Sequence[str], address: str) -> tuple[list[str], str]:
    """Return the command line with which Open MPI starts an agent on each of these hosts, and the Python it runs there.

    Args:
        hosts: The hosts, as Open MPI knows them.
        address: Where agents join, ``ip:port``.
    """
    return [
        "mpiexec",
        *("--host", ",".join(hosts), "-n", f"{len(hosts)}", "--map-by", "ppr:1:node", "--bind-to", "none"),
        "--enable-recovery",  # the agents of other hosts stay when one exits
        *("-x", JOIN_KEY.name),
        *_join_command(sys.executable, address),
    ], sys.executable


def _join_command(python: str, address: str, *options: str) -> list[str]:
    return [python, "-P", "-m", "axon_nb.cli", "host", "--join", address, *options]


def find_job(number: str) -> tuple[str, tuple[str, ...], bool]:
    """Return a Slurm job, those of its nodes on which this process is not, and whether it is on one of its nodes.

    Args:
        number: The job; empty: the one in which this process runs.

    Raises:
        UsageError: there is no such job, it does not run, or it has no other node.
    """
    job, own = number or SLURM_JOB.get(), SLURM_NODE.get()
    if not job:
        raise UsageError(
            "--hosts slurm starts ranks on the nodes of the allocation in which the notebook runs, and it runs in "
            "none: name a job with `--hosts slurm:JOB`; `squeue --me` lists yours."
        )
    state, _, listed = _query(["squeue", "--noheader", f"--jobs={job}", "--format=%T %N"], job).partition(" ")
    if state != "RUNNING":
        raise UsageError(
            f"The Slurm job {job} does not run (its state is {state or 'unknown'}): wait for it, or name another; "
            "`squeue --me` lists yours."
        )
    nodes = _query(["scontrol", "show", "hostnames", listed], job).split()
    here = job == SLURM_JOB.get() and own in nodes
    others = tuple(node for node in nodes if not (here and node == own))
    if not others:
        raise UsageError(
            f"The Slurm job {job} has no node besides this one: leave out `--hosts`, or allocate more nodes."
        )
    return job, others, here


def node_address(node: str) -> str:
    """Return the host name or address of a Slurm node."""
    words = _output(["scontrol", "--oneliner", "show", "node", node]).split()
    return next((word.partition("=")[2] for word in words if word.startswith("NodeAddr=")), node)


def _query(command: Sequence[str], job: str) -> str:
    try:
        done = _run(command)
    except FileNotFoundError:
        raise UsageError(f"--hosts slurm needs the program {command[0]}: run the notebook where Slurm is.") from None
    except subprocess.TimeoutExpired:
        raise StartError(f"Slurm did not respond to {command[0]} within {_QUERY_TIMEOUT_S:.0f} s: try again.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1].rstrip(".")
        raise UsageError(f"Slurm cannot show the job {job} ({reason}): `squeue --me` lists yours.")
    return done.stdout.strip()


def _output(command: Sequence[str]) -> str:
    try:
        done = _run(command)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(command),
        capture_output=True,
        text=True,
        timeout=_QUERY_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    )
