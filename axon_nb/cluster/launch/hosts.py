"""The hosts besides the notebook's: how many there are, how many ranks each gets, and where they join.

Each runs the command `axon-nb host --join`, which starts its agent. It gets the cluster's key through its environment,
where no other user sees it.
"""

from __future__ import annotations

import dataclasses
import time

from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.engines import ON_THIS_HOST
from axon_nb.cluster.launch.placement import Layout, interface_ip
from axon_nb.errors import StartError, UsageError
from axon_nb.host.link.tcp import link_key
from axon_nb.records.environment import JOIN_KEY
from axon_nb.records.protocol.agent import GetInfo, ServeHosts

__all__ = ["await_hosts", "own_address", "parse_hosts"]

_POLL_S = 0.05
_JOIN_TIMEOUT_S = 600.0
"""For somebody to enter the command on another machine."""


def parse_hosts(text: str, num_ranks: int) -> tuple[int, ...]:
    """Parse `--hosts`, ``join`` or ``join:2``; return how many ranks the notebook's host and each other host get.

    Args:
        text: The option.
        num_ranks: Number of ranks on all hosts together.

    Raises:
        UsageError: it is neither, or a host would get no rank.
    """
    launcher, colon, text_number = text.partition(":")
    number = int(text_number) if text_number.isascii() and text_number.isdigit() else 0 if colon else 1
    if launcher != "join" or number < 1:
        raise UsageError(f"--hosts must be join, or join:2 for two other hosts; got {text}.")
    if num_ranks <= number:
        raise UsageError(f"-n must be at least {number + 1}, one rank per host, with --hosts {text}; got {num_ranks}.")
    hosts = number + 1
    return tuple(num_ranks // hosts + (index < num_ranks % hosts) for index in range(hosts))


def own_address(interface: str | None, hosts: str | None, engines: str) -> str | None:
    """Return the address of this host on which ranks on other hosts reach it; None: there are none.

    Args:
        interface: The network interface, or its address.
        hosts: The option `--hosts`.
        engines: Name of the ipyparallel launcher.

    Raises:
        UsageError: there is no such interface, it is needed and missing, or `engines` starts no ranks on other hosts.
    """
    if hosts is not None and engines != "axon":
        raise UsageError(f"--hosts starts forked ranks; it cannot be used with --engines {engines}.")
    if interface is None:
        if hosts is not None:
            raise UsageError(
                f"--hosts {hosts} needs `--interface NAME`, the network interface on which other hosts reach this one: "
                "`%distributed doctor` lists them."
            )
        return None
    if hosts is None and engines in ON_THIS_HOST:
        raise UsageError(
            f"--interface {interface}: the launcher {engines!r} starts ranks on this host only; use `--hosts join` or "
            "another --engines."
        )
    return interface_ip(interface)


def await_hosts(connection: Connection, layout: Layout, counts: tuple[int, ...], *, timeout_s: float) -> Layout:
    """Print the command for the other hosts, and wait until they have joined; return the layout with all ranks' hosts.

    Args:
        connection: Listens on the address on which they reach this host.
        layout: What was planned.
        counts: How many ranks this host and each of the others get.
        timeout_s: How long they may take, in seconds, but ten minutes at least.

    Raises:
        StartError: one cannot join, or not all have in time; the message says what to do.
    """
    agent, key, others = connection.agent, connection.client.session.key, len(counts) - 1
    timeout_s = max(timeout_s, _JOIN_TIMEOUT_S)
    port = agent.call(ServeHosts(connection.ip, link_key(key).hex())).port
    each = "one other host" if others == 1 else f"each of {others} other hosts"
    print(
        f"Run this on {each}, and keep it to yourself, because it holds the cluster's key:\n"
        f"    {JOIN_KEY.name}={key.decode()} axon-nb host --join {connection.ip}:{port}",
        flush=True,
    )
    end = time.monotonic() + timeout_s
    while len((state := agent.call(GetInfo())).hosts) < others:
        if state.hosts_refused:
            raise StartError(state.hosts_refused[-1])
        if time.monotonic() > end:
            raise StartError(
                f"{len(state.hosts)} of {others} other hosts joined within {timeout_s:.0f} s. They must reach "
                f"{connection.ip}, port {port}."
            )
        time.sleep(_POLL_S)
    names = ["", *list(state.hosts)[:others]]
    return dataclasses.replace(
        layout, hosts=tuple(name for name, count in zip(names, counts, strict=True) for _ in range(count))
    )
