"""Which rank computes where: number of ranks, backend, device and threads of each.

Ranks on several hosts: which rank is where, and on which address the notebook's host serves them.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from axon_nb.errors import StartError, UsageError
from axon_nb.host.resources import Gpu, list_gpus, usable_cores
from axon_nb.records.protocol.joining import Place

__all__ = ["BACKENDS", "LOOPBACK", "Layout", "Seat", "interface_ip", "plan_layout", "seats"]

BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks of one host compute."""

    num_ranks: int
    backend: str
    """``gloo`` or ``nccl``."""
    devices: tuple[str, ...]
    """torch device of each rank: ``cpu`` or ``cuda:<index into visible>``."""
    visible: str | None
    """Value of CUDA_VISIBLE_DEVICES on ranks; None: as it is."""
    threads: int
    """Intra-op threads of torch on each rank."""
    notes: tuple[str, ...] = ()
    """What the user should know, a sentence each."""


def plan_layout(
    n: int | None, *, devices: str = "auto", backend: str = "auto", threads: int = 0, several_hosts: bool = False
) -> Layout:
    """Choose devices and backend.

    Args:
        n: Number of ranks; None: one a free GPU, without GPUs min(4, max(2, cores)).
        devices: ``auto``, ``cpu``, or GPU numbers such as ``2,5``, or the MIG instance that is visible.
        backend: ``auto``, ``gloo`` or ``nccl``.
        threads: Intra-op threads a rank; 0: usable cores / ranks, at least 1.
        several_hosts: Whether ranks may be on other hosts, which are taken to have GPUs when this one has.

    Raises:
        UsageError: the wish cannot be met; the message says what can.
    """
    if n is not None and n < 1:
        raise UsageError(f"-n {n}: a cluster has at least 1 rank.")
    if backend not in BACKENDS:
        raise UsageError(f"--backend {backend}: it is one of {', '.join(BACKENDS)}.")
    if several_hosts:
        return _spread(n, devices=devices, backend=backend, threads=threads)
    notes: list[str] = []
    gpus = [] if devices == "cpu" else _choose(devices, list_gpus(), notes)
    cores = usable_cores()
    num_ranks = n if n is not None else (len(gpus) or min(4, max(2, cores)))
    if backend == "nccl" and num_ranks > len(gpus):
        raise UsageError(
            f"NCCL needs a GPU of its own for each rank: {num_ranks} ranks, {len(gpus)} free GPUs. "
            f"Use `-n {len(gpus)}`, or `--backend gloo`."
            if gpus
            else f"--backend nccl with {num_ranks} ranks: NCCL needs GPUs and none is free here. Use gloo."
        )
    if backend == "auto":
        backend = "nccl" if gpus and len(gpus) >= num_ranks else "gloo"
    if gpus and len(gpus) < num_ranks:
        notes.append(f"{num_ranks} ranks share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} (Gloo).")
    placed = tuple(f"cuda:{rank % len(gpus)}" if gpus else "cpu" for rank in range(num_ranks))
    visible = ",".join(gpu.selector for gpu in gpus) if gpus else ("" if devices == "cpu" else None)
    return Layout(num_ranks, backend, placed, visible, threads or max(1, cores // num_ranks), tuple(notes))


def _spread(n: int | None, *, devices: str, backend: str, threads: int) -> Layout:
    """What can be said before it is known which rank is where; `cluster.hosts.seats` completes it."""
    if n is None:
        raise UsageError("`-n` is needed with `--interface`: how many ranks on all hosts together.")
    if devices not in ("auto", "cpu"):
        raise UsageError(f"--devices {devices}: with ranks on several hosts it is auto or cpu.")
    gpus = devices != "cpu" and bool(list_gpus())
    chosen = backend if backend != "auto" else "nccl" if gpus else "gloo"
    visible = "" if devices == "cpu" else None
    return Layout(n, chosen, ("cuda:0" if gpus else "cpu",) * n, visible, threads or 1)


def _choose(devices: str, gpus: list[Gpu], notes: list[str]) -> list[Gpu]:
    if devices == "auto":
        busy = [gpu for gpu in gpus if gpu.busy]
        if busy:
            numbers = ", ".join(str(gpu.index) for gpu in busy)
            notes.append(f"GPU {numbers} skipped: in use. `--devices {busy[0].index}` takes it all the same.")
        return [gpu for gpu in gpus if not gpu.busy]
    by_name = {str(gpu.index): gpu for gpu in gpus} | {gpu.selector: gpu for gpu in gpus}
    chosen: list[Gpu] = []
    for item in map(str.strip, devices.split(",")):
        if not (item.isascii() and item.isdigit()) and not item.startswith("MIG-"):
            raise UsageError(f"--devices {devices}: it is `auto`, `cpu` or GPU numbers such as `0,2`.")
        gpu = by_name.get(str(int(item)) if item.isdigit() else item)
        if gpu is None:
            there = ", ".join(gpu.selector for gpu in gpus) or "none"
            raise UsageError(f"--devices {devices}: GPU {item} is not visible here; visible: {there}.")
        if gpu in chosen:
            raise UsageError(f"--devices {devices}: GPU {item} is there twice.")
        chosen.append(gpu)
    return chosen


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


def seats(layout: Layout, places: Sequence[Place], *, given_threads: int = 0) -> list[Seat]:
    """Each rank's seat.

    Args:
        layout: What was planned for the notebook's host.
        places: What each rank says of its host.
        given_threads: Threads a rank that the user asked for; 0: cores of the host / its ranks.

    Raises:
        StartError: a host has fewer GPUs than NCCL needs.
    """
    hosts = list(dict.fromkeys(place.host for place in places))
    if len(hosts) == 1:
        size = len(places)
        return [Seat(rank, size, 0, layout.devices[rank], layout.threads) for rank in range(size)]
    found = []
    members = {host: [rank for rank, place in enumerate(places) if place.host == host] for host in hosts}
    for rank, place in enumerate(places):
        neighbours, gpus = members[place.host], place.gpus
        local = neighbours.index(rank)
        if layout.backend == "nccl" and gpus < len(neighbours):
            raise StartError(
                f"NCCL needs a GPU of its own for each rank: {place.host} has {len(neighbours)} ranks, {gpus} GPUs."
            )
        device = f"cuda:{local % gpus}" if gpus and layout.devices[0] != "cpu" else "cpu"
        threads = given_threads or max(1, place.cores // len(neighbours))
        found.append(Seat(local, len(neighbours), hosts.index(place.host), device, threads))
    return found
