"""Start the agents of other hosts, and wait until they have joined.

However it is started, each is the command `axon-nb host --join`. What starts it here lives as long as that agent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.host_programs import mpi_command, srun_command, ssh_command
from axon_nb.cluster.launch.hosts import HostsOption
from axon_nb.cluster.launch.placement import Layout
from axon_nb.errors import StartError
from axon_nb.host.link.tcp import link_key
from axon_nb.records.environment import JOIN_KEY, SLURM_JOB
from axon_nb.records.protocol.agent import GetInfo, ServeHosts

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


def await_hosts(connection: Connection, layout: Layout, option: HostsOption, *, timeout_s: float) -> Layout:
    """Start the agents of other hosts and wait until they have joined; return the layout with all ranks' hosts.

    With `join`, print the command that starts one.

    Args:
        connection: Listens on the address on which they reach this host.
        layout: What was planned.
        option: Which hosts, and how many ranks each gets.
        timeout_s: How long they may take, in seconds; `join` waits for ten minutes at least.

    Raises:
        StartError: one cannot join, or not all have in time; the message says what to do.
    """
    joined, others = _start(connection, option, timeout_s=timeout_s), len(option.hosts)
    names = ["", *sorted(joined, key=lambda name: option.hosts.index(name) if name in option.hosts else others)]
    return dataclasses.replace(
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
        option = HostsOption(text, launcher, missing, (), job or SLURM_JOB.get())
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
    with _started(option, address, key, connection.run_dir.path / "log") as programs:
        end = time.monotonic() + timeout_s
        while len(new := {*(state := agent.call(GetInfo())).hosts} - {*before.hosts}) < others:
            if len(state.hosts_refused) > len(before.hosts_refused):
                raise StartError(state.hosts_refused[-1])
            for program in programs:
                program.raise_if_failed()
            if time.monotonic() > end:
                raise StartError(
                    f"{len(new)} of {others} other hosts joined within {timeout_s:.0f} s. They must reach "
                    f"{connection.ip}, port {port}."
                )
            time.sleep(_POLL_S)
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
def _started(option: HostsOption, address: str, key: bytes, folder: Path) -> Iterator[list[_Program]]:
    """Start the programs; if the caller raises, terminate them: agents that have not joined then find no cluster."""
    programs: list[_Program] = []
    try:
        if option.launcher in ("slurm", "mpi"):
            command, python = (
                mpi_command(option.hosts, address)
                if option.launcher == "mpi"
                else srun_command(option.job, option.hosts, address)
            )
            programs.append(_Program(option.launcher, option.hosts, python, folder).start(command, key))
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
