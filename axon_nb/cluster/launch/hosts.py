"""The hosts besides the notebook's: which they are, how many ranks each gets, and on which address they join."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from axon_nb.cluster.launch import host_programs
from axon_nb.cluster.launch.placement import interface_ip
from axon_nb.errors import UsageError

_USES = "join, join:2, ssh:a,b, slurm, slurm:JOB or mpi:a,b"


@dataclass(frozen=True, slots=True)
class HostsOption:
    """What `--hosts` asks for."""

    text: str
    """The option."""
    launcher: str
    """``join``, ``ssh``, ``slurm`` or ``mpi``."""
    hosts: tuple[str, ...]
    """The names of the other hosts; empty ones for `join`, where they name themselves."""
    counts: tuple[int, ...]
    """How many ranks the notebook's host and each of the others get."""
    job: str = ""
    """The Slurm job whose nodes they are."""


def parse_hosts(text: str, num_ranks: int) -> HostsOption:
    """Parse `--hosts`: ``join:2``, ``ssh:a,b=4``, ``ssh`` (ipyparallel's configuration), ``slurm:JOB`` or ``mpi:a,b``.

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
        wanted = dict(host_programs.configured_hosts()) if text == "ssh" else _named(text, names)
        if launcher == "mpi" and any(wanted.values()):  # a host names itself there, maybe not as it is named here
            raise UsageError(f"--hosts mpi: takes host names without numbers, such as mpi:a,b; got {text}.")
        return HostsOption(text, launcher, tuple(wanted), _spread(text, [None, *wanted.values()], num_ranks))
    if launcher == "slurm" and (names or not colon):
        job, nodes, here = host_programs.find_job(names)
        counts = _spread(text, [None if here else 0, *[None] * len(nodes)], num_ranks)
        return HostsOption(text, launcher, nodes, counts, job)
    raise UsageError(f"--hosts must be {_USES}; got {text}.")


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


def own_address(interface: str | None, others: HostsOption | None, engines: str) -> str | None:
    """Return the address of this host on which ranks on other hosts reach it; None: there are none.

    Args:
        interface: The network interface, or its address; None: the one that leads to the first of the other hosts.
        others: What `--hosts` asks for, if anything.
        engines: Name of the launcher.

    Raises:
        UsageError: there is no such interface, it is needed and missing, or ranks are not forked.
    """
    if others is not None and engines != "axon":
        raise UsageError(f"--hosts starts forked ranks; it cannot be used with --engines {engines}.")
    if interface is not None:
        if others is None:
            raise UsageError(
                f"--interface {interface}: all ranks are on this host; use `--hosts ssh:NAME` or `--hosts join`."
            )
        return interface_ip(interface)
    if others is None:
        return None
    if others.launcher == "join":
        raise UsageError(
            f"--hosts {others.text} needs `--interface NAME`, the network interface on which other hosts reach this "
            "one: `%distributed doctor` lists them."
        )
    find_address = host_programs.node_address if others.launcher == "slurm" else host_programs.ssh_address
    name = find_address(others.hosts[0])
    try:
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.connect((name, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"--hosts {others.text}: cannot resolve {name} ({error.strerror}). Correct its name, or use `--interface "
            "NAME` to name the network interface on which it reaches this host."
        ) from None
