"""Ranks on several hosts: which rank is where, and on which address the notebook's host serves them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from axon_nb.cluster.layout import Layout
from axon_nb.errors import StartError, UsageError

__all__ = ["LOOPBACK", "Seat", "interface_ip", "seats"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one rank computes."""

    local_rank: int
    """Index among the ranks of its host."""
    local_world_size: int
    """Number of ranks on its host."""
    node_rank: int
    """Index of its host, in the order of the lowest rank there."""
    device: str
    """``cpu`` or ``cuda:<index>``."""
    threads: int
    """Intra-op threads of torch."""


def interface_ip(wanted: str) -> str:
    """The IPv4 address of a network interface of this host, which is named by itself or by that address.

    Raises:
        UsageError: there is no such interface; the message names those there are.
    """
    addresses: dict[str, str] = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    if wanted in addresses:
        return addresses[wanted]
    if wanted in addresses.values():
        return wanted
    there = ", ".join(f"{name} ({ip})" for name, ip in addresses.items() if not ipaddress.ip_address(ip).is_loopback)
    raise UsageError(f"--interface {wanted}: this host has no such interface or address; it has {there or 'none'}.")


def seats(layout: Layout, places: Sequence[Mapping[str, Any]], *, given_threads: int = 0) -> list[Seat]:
    """Each rank's seat.

    Args:
        layout: What was planned for the notebook's host.
        places: What each rank says of its host: ``host``, ``cores``, ``gpus``.
        given_threads: Threads a rank that the user asked for; 0: cores of the host / its ranks.

    Raises:
        StartError: a host has fewer GPUs than NCCL needs.
    """
    hosts = list(dict.fromkeys(place["host"] for place in places))
    if len(hosts) == 1:
        size = len(places)
        return [Seat(rank, size, 0, layout.devices[rank], layout.threads) for rank in range(size)]
    found = []
    members = {host: [rank for rank, place in enumerate(places) if place["host"] == host] for host in hosts}
    for rank, place in enumerate(places):
        neighbours, gpus = members[place["host"]], int(place["gpus"])
        local = neighbours.index(rank)
        if layout.backend == "nccl" and gpus < len(neighbours):
            raise StartError(
                f"NCCL needs a GPU of its own for each rank: {place['host']} has {len(neighbours)} ranks, {gpus} GPUs."
            )
        device = f"cuda:{local % gpus}" if gpus and layout.devices[0] != "cpu" else "cpu"
        threads = given_threads or max(1, int(place["cores"]) // len(neighbours))
        found.append(Seat(local, len(neighbours), hosts.index(place["host"]), device, threads))
    return found
