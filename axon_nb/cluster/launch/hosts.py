"""The hosts besides the notebook's: which they are, how many ranks each gets, and how their agents are started.

`ssh` starts the agents once per host, `srun`, `mpiexec` or Ray once for all. Each runs `axon-nb host --join` on the
other hosts. That reads the cluster's key from standard input, or from the environment with `mpiexec`, which gives its
input to one process: the key is in no command line. What starts an agent here lives as long as that agent; with
Kubernetes, until it has joined.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
from ipyparallel.cluster.launcher import SSHEngineSetLauncher
from IPython.paths import get_ipython_dir
from msgspec import Struct
from traitlets.config import Config
from traitlets.config.loader import ConfigFileNotFound, PyFileConfigLoader

from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.placement import Layout, address_towards, interface_ip
from axon_nb.errors import StartError, UsageError
from axon_nb.host.connections import link_key
from axon_nb.records.environment import JOIN_KEY, SLURM_JOB, SLURM_NODE
from axon_nb.records.protocol.agent import GetInfo, ServeHosts

if TYPE_CHECKING:
    from axon_nb.cluster.launch.schedulers import SchedulerOption, SchedulerProgram

SCHEDULERS = ("ray", "k8s")
_USES = "join, join:2, ssh:a,b, slurm, slurm:JOB, mpi:a,b, ray, ray:ADDRESS, k8s or k8s:NAMESPACE=RANKS"
_QUERY_TIMEOUT_S = 20.0
# The first value of an option holds: what the user configured comes before these. Passwords cannot be asked for. A
# connection that other programs may use would outlive the cluster.
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ControlMaster=no", "RequestTTY=no")
_WITHOUT_SIGINT = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
"""Command that runs another: Jupyter's stop button signals the kernel's whole process group."""
_POLL_S = 0.05
_JOIN_TIMEOUT_S = 600.0
"""For somebody to enter the command on another machine."""
_RESTART_TIMEOUT_S = 60.0
_REJOIN_S = 3.0
"""For an agent whose link was cut to join again by itself."""
_OWN_MESSAGE = "axon-nb: "
_SSH_FAILED = 255
_SSH_FIXES = {
    "Could not resolve": " Correct its name, or add it to ~/.ssh/config.",
    "Permission denied": " Run `ssh-copy-id {host}`, so that `ssh {host}` works without a password.",
    "Host key verification failed": " Run `ssh {host}` in a terminal once, to accept its key.",
}
_FIX = {
    "ssh": " Make sure that `ssh {host}` works in a terminal.",
    "slurm": " Make sure that `srun --jobid=JOB --overlap hostname` works in a terminal.",
    "mpi": " Make sure that `mpiexec --host {host} hostname` works in a terminal.",
}
_INSTALL = {
    "ssh": "install it there, or set `c.SSHLauncher.remote_python` in ipcluster_config.py to a Python that has it",
    "slurm": "install it in an environment on a disk that the nodes share, and start the notebook from that",
    "mpi": "install it in the same folder there",
}


class HostsOption(Struct, frozen=True):
    """What `--hosts` asks for."""

    text: str
    """The option."""
    launcher: str
    """``join``, ``ssh``, ``slurm``, ``mpi``, ``ray`` or ``k8s``."""
    hosts: tuple[str, ...]
    """The names of the other hosts; empty ones for `join`, where they name themselves."""
    counts: tuple[int, ...]
    """How many ranks the notebook's host and each of the others get."""
    job: str = ""
    """The Slurm job whose nodes they are."""
    scheduler: SchedulerOption | None = None

    def give_back(self) -> None:
        """Have the scheduler take back what it has reserved."""
        if self.scheduler is not None and self.scheduler.program is not None:
            self.scheduler.program.end()


def parse_hosts(text: str, num_ranks: int) -> HostsOption:
    """Parse `--hosts`: ``join:2``, ``ssh:a,b=4``, ``ssh`` (ipyparallel's configuration), ``slurm:JOB`` or ``mpi:a,b``.

    With ``ray`` or ``k8s`` the hosts are found later: `with_room`.

    Args:
        text: The option.
        num_ranks: Number of ranks on all hosts together.

    Raises:
        UsageError: it is none of these, a host would get no rank, or Slurm runs no such job.
    """
    launcher, colon, names = text.partition(":")
    if launcher == "join":
        number = int(names) if names.isascii() and names.isdigit() else 0 if colon else 1
        if number < 1:
            raise UsageError(f"--hosts join:N needs the number of other hosts, such as join:2; got {text}.")
        return HostsOption(text, launcher, ("",) * number, _spread(text, [None] * (number + 1), num_ranks))
    if launcher in ("ssh", "mpi"):
        wanted = dict(configured_hosts()) if text == "ssh" else _named(text, names)
        if launcher == "mpi" and any(wanted.values()):  # a host names itself there, maybe not as it is named here
            raise UsageError(f"--hosts mpi: takes host names without numbers, such as mpi:a,b; got {text}.")
        return HostsOption(text, launcher, tuple(wanted), _spread(text, [None, *wanted.values()], num_ranks))
    if launcher == "slurm" and (names or not colon):
        job, nodes, here = find_job(names)
        counts = _spread(text, [None if here else 0, *[None] * len(nodes)], num_ranks)
        return HostsOption(text, launcher, nodes, counts, job)
    if launcher in SCHEDULERS:
        return HostsOption(text, launcher, (), (), scheduler=parse_scheduler(text))
    raise UsageError(f"--hosts must be {_USES}; got {text}.")


def with_room(
    option: HostsOption | None, layout: Layout, ip: str | None, *, cpu: bool, backend: str
) -> tuple[HostsOption | None, Layout, str | None]:
    """With a scheduler, find the hosts, on which all ranks are, their devices, and where they reach this host.

    Args:
        option: What `--hosts` asks for, if anything.
        layout: What was planned.
        ip: What `own_address` found.
        cpu: Whether ranks are to use CPUs only.
        backend: The backend that was asked for, or ``auto``.

    Returns:
        All three, unchanged without a scheduler.

    Raises:
        UsageError: GPUs are asked for and not.
        StartError: the scheduler cannot be reached, or has no room; the message says what is missing.
    """
    if option is None or option.scheduler is None:
        return option, layout, ip
    if cpu and option.scheduler.gpus_per_rank:
        raise UsageError("--gpus-per-rank 1 and --devices cpu exclude each other.")
    found, layout, ip = option.scheduler.find_room(layout, ip, cpu=cpu, backend=backend)
    return HostsOption(found.text, found.name, found.hosts, (0, *found.bundles), scheduler=found), layout, ip


def parse_scheduler(text: str) -> SchedulerOption:
    """Parse `--hosts ray` or `--hosts k8s`.

    Raises:
        UsageError: a value is none that is possible, or the scheduler's client is missing.
    """
    from axon_nb.cluster.launch.schedulers import K8sOption, RayOption

    return (RayOption if text.partition(":")[0] == "ray" else K8sOption).parse(text)


def _named(text: str, names: str) -> dict[str, int | None]:
    launcher, hosts = text.partition(":")[0], dict[str, int | None]()
    for item in names.split(","):
        name, equals, count = item.strip().partition("=")
        host = name.rpartition("@")[2]
        is_name = host and "-" not in (name[:1], host[:1])  # else ssh takes it as an option
        if not is_name or (equals and not (count.isascii() and count.isdigit() and int(count))):
            raise UsageError(f"--hosts {launcher}: needs host names, such as {launcher}:a,b; got {text}.")
        if name in hosts:
            raise UsageError(f"--hosts {text}: {name} is listed twice.")
        hosts[name] = int(count) if equals else None
    return hosts


def _spread(text: str, wanted: Sequence[int | None], num_ranks: int) -> tuple[int, ...]:
    """Return how many ranks each host gets, the notebook's first; None: an equal part of what the others leave.

    The notebook's host may get none if each of the others is listed with a number.
    """
    sharing, listed = sum(count is None for count in wanted), sum(count or 0 for count in wanted)
    needed = listed + (sharing if None in wanted[1:] else 0)
    if num_ranks < needed:
        raise UsageError(f"-n must be at least {needed} with --hosts {text}, one rank per host; got {num_ranks}.")
    shares = iter([(num_ranks - listed + sharing - 1 - index) // sharing for index in range(sharing)])
    return tuple(next(shares) if count is None else count for count in wanted)


def own_address(
    interface: str | None, others: HostsOption | None, engines: str, *, sync: str | None = None
) -> str | None:
    """Return the address on which ranks on other hosts reach this one; None: there are none, or a scheduler has them.

    Args:
        interface: The network interface, or its address; None: the one that leads to the first of the other hosts.
        others: What `--hosts` asks for, if anything.
        engines: Name of the launcher.
        sync: The option `--sync`.

    Raises:
        UsageError: there is no such interface, it is needed and missing, or ranks are not forked.
    """
    if sync is not None and (others is None or not os.path.isdir(os.path.expanduser(sync))):
        raise UsageError(f"--sync needs --hosts, and a folder that exists, such as `.`; got {sync}.")
    if others is not None and engines != "axon":
        raise UsageError(f"--hosts starts forked ranks; it cannot be used with --engines {engines}.")
    if interface is not None:
        if others is None:
            raise UsageError(
                f"--interface {interface}: all ranks are on this host; use `--hosts ssh:NAME` or `--hosts join`."
            )
        return interface_ip(interface)
    if others is None or others.scheduler is not None:
        return None
    if others.launcher == "join":
        raise UsageError(
            f"--hosts {others.text} needs `--interface NAME`, the network interface on which other hosts reach this "
            "one: `%distributed doctor` lists them."
        )
    find_address = node_address if others.launcher == "slurm" else ssh_address
    return address_towards(find_address(others.hosts[0]), others.text)


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


def await_hosts(
    connection: Connection, layout: Layout, option: HostsOption, *, timeout_s: float, sync: str | None = None
) -> Layout:
    """Start the agents of other hosts and wait until they have joined; return the layout with all ranks' hosts.

    With `join`, print the command that starts one.

    Args:
        connection: Listens on the address on which they reach this host.
        layout: What was planned.
        option: Which hosts, and how many ranks each gets.
        timeout_s: How long they may take, in seconds; `join` waits for ten minutes at least.
        sync: The folder to bring there; None: none.

    Raises:
        StartError: one cannot join, or not all have in time; the message says what to do.
    """
    joined, others = _start(connection, option, timeout_s=timeout_s), len(option.hosts)
    if sync is not None:
        connection.sync(sync).update()
    names = ["", *sorted(joined, key=lambda name: option.hosts.index(name) if name in option.hosts else others)]
    return msgspec.structs.replace(
        layout, hosts=tuple(name for name, count in zip(names, option.counts, strict=False) for _ in range(count))
    )


def start_missing(connection: Connection, layout: Layout, text: str, ranks: Iterable[int]) -> None:
    """Start the agents of ranks' hosts that are gone again; those of `join` only their hosts' users can start.

    Args:
        connection: The cluster's connection.
        layout: Where its ranks are.
        text: The option `--hosts` with which it was started.
        ranks: The ranks that need an agent.

    Raises:
        StartError: one cannot join; the message says what to do.
    """
    launcher, _, job = text.partition(":")
    needed = dict.fromkeys(layout.host_of(rank) for rank in ranks)
    if launcher == "join" or not any(needed):
        return
    end = time.monotonic() + _REJOIN_S
    while missing := tuple(name for name in needed if name and name not in connection.agent.call(GetInfo()).hosts):
        if time.monotonic() > end:
            break
        time.sleep(_POLL_S)
    if missing:
        scheduler = parse_scheduler(text) if launcher in SCHEDULERS else None
        option = HostsOption(text, launcher, missing, (), job or SLURM_JOB.get(), scheduler)
        try:
            _start(connection, option, timeout_s=_RESTART_TIMEOUT_S)
        except StartError as error:
            elsewhere = f"`%distributed repair --on {socket.gethostname()}` starts the lost ranks on this host instead."
            raise StartError(f"{error} {elsewhere}") from None


def _start(connection: Connection, option: HostsOption, *, timeout_s: float) -> list[str]:
    """Start agents, and return the names of all hosts that have joined as soon as those have."""
    agent, key, others = connection.agent, connection.client.session.key, len(option.hosts)
    port = agent.call(ServeHosts(connection.ip, link_key(key).hex())).port
    address = f"{connection.ip}:{port}"
    if option.launcher == "join":
        timeout_s = max(timeout_s, _JOIN_TIMEOUT_S)
        each = "one other host" if others == 1 else f"each of {others} other hosts"
        print(
            f"Run this on {each}, and keep it to yourself, because it holds the cluster's key:\n"
            f"    {JOIN_KEY.name}={key.decode()} axon-nb host --join {address}",
            flush=True,
        )
    before = agent.call(GetInfo())
    with _started(option, address, connection, timeout_s) as programs:
        end = time.monotonic() + timeout_s
        while len(new := {*(state := agent.call(GetInfo())).hosts} - {*before.hosts}) < others:
            if len(state.hosts_refused) > len(before.hosts_refused):
                raise StartError(state.hosts_refused[-1])
            for program in programs:
                program.raise_if_failed()
            if time.monotonic() > end:
                if option.scheduler is not None:
                    programs[0].raise_if_failed(_QUERY_TIMEOUT_S)  # it says more
                raise StartError(
                    f"{len(new)} of {others} other hosts joined within {timeout_s:.0f} s. They must reach "
                    f"{connection.ip}, port {port}."
                )
            time.sleep(_POLL_S)
        if option.scheduler is not None:
            print("\n".join(programs[0].placed(timeout_s)), flush=True)
    return list(state.hosts)


@dataclass
class _Program:
    """A process here that starts the agents of one or several hosts."""

    launcher: str
    hosts: tuple[str, ...]
    python: str
    """What it runs there."""
    folder: Path
    """Where its output is kept."""
    output: Path = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, command: list[str], key: bytes) -> Self:
        """Run it, and give it the cluster's key.

        Raises:
            StartError: there is no such program.
        """
        log, path = tempfile.mkstemp(prefix="host-", suffix=".log", dir=self.folder)
        self.output = Path(path)
        env = {**os.environ, JOIN_KEY.name: key.decode()} if self.launcher == "mpi" else None
        try:
            # Not in the kernel's process group, which Jupyter's stop button signals.
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            raise StartError(f"Cannot run {command[0]}: {error.strerror}. Install it.") from None
        finally:
            os.close(log)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as stdin:  # if it has exited, its output says why
            stdin.write(key + b"\n")
        return self

    def raise_if_failed(self) -> None:
        """Raise if it has exited, or says that a host cannot join.

        Raises:
            StartError: why, and what to do.
        """
        code = self.process.poll()
        lines = [line.strip() for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
        own = [line.partition(_OWN_MESSAGE)[2] for line in lines if line.startswith(_OWN_MESSAGE)]
        if code is None and not own:
            return
        host, several = self.hosts[0], len(self.hosts) > 1
        who = f"One of the hosts {', '.join(self.hosts)}" if several else f"The host {host!r}"
        if own:
            raise StartError(f"{who} cannot join: {own[0]}")
        if any("No module named" in line and "axon_nb" in line for line in lines):
            raise StartError(f"{who} has no axon_nb for {self.python}: {_INSTALL[self.launcher]}.")
        if any(self.python in line and ("not found" in line or "No such file" in line) for line in lines):
            raise StartError(f"{who} has no {self.python}: {_INSTALL[self.launcher]}.")
        first = 0 if self.launcher == "mpi" else -1  # Open MPI explains at length what ssh said before
        reason = (lines[first] if lines else f"its program exited with code {code}").rstrip(".")
        fix = _FIX[self.launcher]
        if self.launcher == "ssh" and code == _SSH_FAILED:
            fix = next((fix for words, fix in _SSH_FIXES.items() if words in reason), fix)
        raise StartError(f"{who} cannot join: {reason}.{fix.format(host=host)}")

    def leave(self) -> None:
        """Let it run as long as the agents; a thread reaps it, so that a long-lived kernel keeps no zombie."""
        threading.Thread(target=self.process.wait, name="axon_nb-host-reaper", daemon=True).start()


@contextlib.contextmanager
def _started(option: HostsOption, address: str, connection: Connection, timeout_s: float) -> Iterator[list[Any]]:
    """Start the programs; if the caller raises, terminate them: agents that have not joined then find no cluster."""
    programs: list[_Program | SchedulerProgram] = []
    folder, key = connection.run_dir.path / "log", connection.client.session.key
    try:
        if option.launcher in ("slurm", "mpi"):
            command, python = (
                mpi_command(option.hosts, address)
                if option.launcher == "mpi"
                else srun_command(option.job, option.hosts, address)
            )
            programs.append(_Program(option.launcher, option.hosts, python, folder).start(command, key))
        elif option.scheduler is not None:
            programs.append(option.scheduler.place(option.hosts, connection, address, timeout_s))
        elif option.launcher == "ssh":
            for host in option.hosts:
                command, python = ssh_command(host, address)
                programs.append(_Program(option.launcher, (host,), python, folder).start(command, key))
        yield programs
    except BaseException:
        for program in programs:
            with contextlib.suppress(OSError):
                program.process.terminate()
        raise
    finally:
        for program in programs:
            program.leave()
