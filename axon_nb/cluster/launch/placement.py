"""Where ranks run: how many there may be, their backend, and the host, device and threads of each.

For ranks on several hosts it also finds the address on which the notebook's host serves them. The administrator's limit
of ranks per user is a courtesy on a shared machine, not a protection against users.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import socket
import sys
import urllib.parse
from collections.abc import Iterator, Sequence

import psutil
from msgspec import Struct

from axon_nb.errors import StartError, UsageError
from axon_nb.host.resources import Gpu, container_kind, gpu_owners, list_gpus, unlisted_gpus, usable_cores
from axon_nb.host.run_dir import RunDir, list_run_dirs
from axon_nb.records.environment import CPU_BACKEND, MAX_RANKS
from axon_nb.records.protocol.agent import EngineInfo
from axon_nb.records.protocol.recovery import Placement
from axon_nb.records.units import count_of

BACKENDS = ("auto", "shm", "gloo", "nccl")
LOOPBACK = "127.0.0.1"
UNLIMITED = resource.RLIM_INFINITY
_MANY = 65536


class Layout(Struct, frozen=True):
    """Number, backend and devices of the ranks on the notebook's host."""

    num_ranks: int
    backend: str
    """``shm``, ``gloo`` or ``nccl``."""
    devices: tuple[str, ...]
    """torch device of each rank: ``cpu`` or ``cuda:<index into visible>``."""
    visible: str | None
    """Value of CUDA_VISIBLE_DEVICES on ranks, or of all of them together; None: unchanged."""
    threads: int
    """Intra-op threads of torch on each rank."""
    notes: tuple[str, ...] = ()
    """What the user should know, one sentence each."""
    visible_by_rank: tuple[str, ...] = ()
    """The value of each rank if they differ: a process sees one MIG instance, and no card besides it."""
    reserves: tuple[str, ...] = ()
    """The GPUs of this host that ranks use, by the names in reservations."""
    hosts: tuple[str, ...] = ()
    """Host of each rank, empty for the notebook's own; no entries: all ranks are there, or a launcher placed them."""

    def host_of(self, rank: int) -> str:
        """Return the host of a rank by the name with which it joined; empty: the notebook's own."""
        return self.hosts[rank] if self.hosts else ""

    def visible_to(self, rank: int) -> str | None:
        """Return the value of CUDA_VISIBLE_DEVICES on a rank; None: unchanged."""
        return self.visible_by_rank[rank] if self.visible_by_rank else self.visible


def plan_layout(
    n: int | None, *, devices: str = "auto", backend: str = "auto", threads: int = 0, several_hosts: bool = False
) -> Layout:
    """Choose devices and backend.

    Args:
        n: Number of ranks; None: one per free GPU, or min(4, max(2, cores)) without GPUs or on a single one.
        devices: ``auto``, ``cpu``, or GPU numbers such as ``2,5``, or MIG instances.
        backend: ``auto``, ``shm``, ``gloo`` or ``nccl``.
        threads: Intra-op threads per rank; 0: usable cores / ranks, at least 1.
        several_hosts: Whether ranks may be on other hosts; they are assumed to have GPUs if this one has.

    Raises:
        UsageError: the request cannot be satisfied; the message says which can.
    """
    if n is not None and n < 1:
        raise UsageError(f"-n must be at least 1; got {n}.")
    if backend not in BACKENDS:
        raise UsageError(f"--backend must be one of {', '.join(BACKENDS)}; got {backend}.")
    if several_hosts:
        return _several_hosts(n, devices=devices, backend=backend, threads=threads)
    notes: list[str] = []
    listed = [] if devices == "cpu" else list_gpus()
    gpus = [] if devices == "cpu" else _choose_gpus(devices, listed, notes)
    files = [] if gpus or devices == "cpu" else unlisted_gpus()
    if files:
        notes.append(
            f"There is a GPU driver ({', '.join(files)}), but neither nvidia-smi nor nvidia-ml-py lists a GPU: the "
            "ranks use CPUs. Run `%distributed doctor` to see why."
        )
    cores = usable_cores()
    slices = any(gpu.mig for gpu in gpus) and len(gpus) > 1
    if slices and backend == "nccl":
        raise UsageError("NCCL does not connect MIG instances: use `--backend gloo`, or `--devices` with one of them.")
    few = not gpus or (len(gpus) == 1 and devices == "auto" and backend != "nccl")
    num_ranks = n if n is not None else min(4, max(2, cores)) if few else len(gpus)
    if backend == "nccl" and num_ranks > len(gpus):
        problem = (
            f"NCCL needs one GPU per rank, but there are {num_ranks} ranks and "
            f"{count_of(len(gpus), 'free GPU')}. Use `-n {len(gpus)}` or `--backend gloo`."
            if gpus
            else "NCCL needs GPUs, and none is free here. Use `--backend gloo`."
        )
        raise UsageError(" ".join([problem, *notes]))
    if backend == "auto":
        alone = len(gpus) >= num_ranks and (not slices or num_ranks == 1)
        backend = ("nccl" if alone else "gloo") if gpus else _cpu_backend()
    if gpus and (len(gpus) < num_ranks or slices):
        notes.append(_sharing(num_ranks, gpus, backend, more=few and n is None))
    threads = threads or max(1, cores // num_ranks)
    if not gpus:  # a GPU that no rank uses is hidden: libraries would compute on it
        hidden = devices == "cpu" or bool(listed or files)
        return Layout(num_ranks, backend, ("cpu",) * num_ranks, "" if hidden else None, threads, tuple(notes))
    own = [gpus[rank % len(gpus)].selector for rank in range(num_ranks)] if slices else []
    rank_devices = tuple("cuda:0" if slices else f"cuda:{rank % len(gpus)}" for rank in range(num_ranks))
    visible = ",".join(gpu.selector for gpu in gpus)
    reserves = tuple(gpu.key for gpu in gpus[:num_ranks])
    return Layout(num_ranks, backend, rank_devices, visible, threads, tuple(notes), tuple(own), reserves)


def rank_environment(layout: Layout, rank: int = 0) -> dict[str, str]:
    """Return the environment variables that a rank gets besides the notebook's own."""
    env = {} if layout.host_of(rank) else {"OMP_NUM_THREADS": str(layout.threads)}  # other hosts have other cores
    if (visible := layout.visible_to(rank)) is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the layout numbers GPUs as nvidia-smi does
    return env


def explain_number(layout: Layout) -> str:
    """Say in a sentence why there are so many ranks if nobody chose it; empty if the layout's notes say it."""
    num_gpus, ranks = len({*layout.devices} - {"cpu"}), count_of(layout.num_ranks, "rank")
    if not num_gpus:
        return f"{ranks} for {count_of(usable_cores(), 'CPU core')} (2 to 4 by default); `-n` chooses another number."
    return f"{ranks}, one for each free GPU." if num_gpus == layout.num_ranks and not layout.visible_by_rank else ""


def _sharing(num_ranks: int, gpus: Sequence[Gpu], backend: str, *, more: bool) -> str:
    """Say in a sentence which GPUs the ranks use, and through what they communicate.

    Args:
        num_ranks: Number of ranks.
        gpus: What they use.
        backend: How they communicate.
        more: Whether there are more ranks than GPUs although nobody asked for it.
    """
    through = {"shm": "shared memory", "nccl": "NCCL"}.get(backend, "Gloo")
    instances = all(gpu.mig for gpu in gpus) and len(gpus) > 1
    what = count_of(len(gpus), "MIG instance" if instances else "GPU")
    if num_ranks > len(gpus):
        alone = " Use `-n 1` for one rank, on NCCL." if more else ""
        return f"{num_ranks} ranks share {what} ({through}).{alone}"
    return (
        f"{num_ranks} ranks use {what}, one each ({through})."
        if num_ranks == len(gpus)
        else (f"{num_ranks} of {what} are used ({through}).")
    )


def _cpu_backend() -> str:
    chosen = CPU_BACKEND.get()
    if chosen not in ("shm", "gloo"):
        raise UsageError(f"{CPU_BACKEND.name} must be shm or gloo; got {chosen}.")
    return chosen if hasattr(os, "memfd_create") else "gloo"


def _several_hosts(n: int | None, *, devices: str, backend: str, threads: int) -> Layout:
    """Plan what can be planned before the ranks' hosts are known; `place_ranks` completes it."""
    if n is None:
        raise UsageError("Several hosts need `-n`, the number of ranks on all of them together.")
    if devices not in ("auto", "cpu"):
        raise UsageError(f"--devices must be auto or cpu with ranks on several hosts; got {devices}.")
    if backend == "shm":
        raise UsageError("--backend shm is for the ranks of one host; use `--backend gloo` with several.")
    gpus = devices != "cpu" and bool(list_gpus())
    chosen = backend if backend != "auto" else "nccl" if gpus else "gloo"
    visible = "" if devices == "cpu" else None
    return Layout(n, chosen, ("cuda:0" if gpus else "cpu",) * n, visible, threads or 1)


def _choose_gpus(devices: str, gpus: list[Gpu], notes: list[str]) -> list[Gpu]:
    owners = gpu_owners(gpu.key for gpu in gpus)
    if devices == "auto":
        taken = {gpu.selector: owners[gpu.key] for gpu in gpus if gpu.key in owners}
        for selector, owner in taken.items():
            stop = "" if owner.user else f"run `axon-nb stop {owner.name}` if it is not needed any more, or "
            share = f"pass `--devices {selector}` to share it."
            notes.append(f"Skipping GPU {selector} (reserved by the cluster {owner}): {stop}{share}")
        gpus = [gpu for gpu in gpus if gpu.key not in owners]
        busy = [gpu for gpu in gpus if gpu.busy]
        if busy:
            numbers = ", ".join(str(gpu.index) for gpu in busy)
            plural = "s" * (len(busy) > 1)
            notes.append(f"Skipping GPU{plural} {numbers} (in use); pass `--devices {busy[0].index}` to use it anyway.")
        return [gpu for gpu in gpus if not gpu.busy]
    chosen: list[Gpu] = []
    for item in map(str.strip, devices.split(",")):
        if not (item.isascii() and item.isdigit()) and not item.startswith("MIG-"):
            raise UsageError(f"--devices must be `auto`, `cpu` or GPU numbers such as `0,2`; got {devices}.")
        # The number of a card stands for all its instances.
        found = [gpu for gpu in gpus if (gpu.index == int(item) if item.isdigit() else gpu.mig == item)]
        if not found:
            visible = ", ".join(gpu.selector for gpu in gpus) or "none"
            raise UsageError(f"--devices {devices}: GPU {item} is not visible here; visible: {visible}.")
        if found[0] in chosen:
            raise UsageError(f"--devices {devices}: GPU {item} is listed twice.")
        chosen += found
    notes += [
        f"GPU {gpu.selector} is reserved by the cluster {owners[gpu.key]}, too: both share its memory and its time."
        for gpu in chosen
        if gpu.key in owners
    ]
    return chosen


def interface_ip(wanted: str) -> str:
    """Return the IPv4 address of a network interface of this host, given by its name or by that address.

    Raises:
        UsageError: there is no such interface; the message lists those that exist.
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
    known = ", ".join(f"{name} ({ip})" for name, ip in addresses.items() if not ipaddress.ip_address(ip).is_loopback)
    raise UsageError(f"--interface {wanted}: this host has no such interface or address; it has {known or 'none'}.")


def address_towards(name: str, option: str) -> str:
    """Return the address from which this host reaches another.

    Args:
        name: The other host's name or address.
        option: What `--hosts` asked for.

    Raises:
        UsageError: the name cannot be resolved.
    """
    try:
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.connect((name, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"--hosts {option}: cannot resolve {name} ({error.strerror}). Correct its name, or use `--interface "
            "NAME` to name the network interface on which it reaches this host."
        ) from None


def place_ranks(layout: Layout, rank_info: Sequence[EngineInfo], *, threads_per_rank: int = 0) -> list[Placement]:
    """Return the placement of each rank.

    Args:
        layout: What was planned for the notebook's host.
        rank_info: What each rank reports about its host.
        threads_per_rank: As set by the user; 0: cores of the host / its ranks.

    Raises:
        StartError: a host has fewer GPUs than NCCL needs.
    """
    hosts = list(dict.fromkeys(info.host for info in rank_info))
    if len(hosts) == 1 and not layout.host_of(0):
        size = len(rank_info)
        return [Placement(rank, size, 0, layout.devices[rank], layout.threads) for rank in range(size)]
    placements = []
    members = {host: [rank for rank, info in enumerate(rank_info) if info.host == host] for host in hosts}
    for rank, info in enumerate(rank_info):
        neighbours, gpus = members[info.host], info.gpus
        local_rank = neighbours.index(rank)
        if layout.backend == "nccl" and gpus < len(neighbours):
            raise StartError(
                f"NCCL needs one GPU per rank, but {info.host} has {len(neighbours)} ranks and {count_of(gpus, 'GPU')}."
            )
        device = f"cuda:{local_rank % gpus}" if gpus and layout.devices[0] != "cpu" else "cpu"
        threads = threads_per_rank or max(1, info.cores // len(neighbours))
        placements.append(Placement(local_rank, len(neighbours), hosts.index(info.host), device, threads))
    return placements


def raise_if_over_quota(num_ranks: int, *, besides: RunDir | None = None) -> None:
    """Check how many ranks this user would have at once, in all clusters of this host's notebooks.

    Args:
        num_ranks: The ranks that the cluster is to have.
        besides: The folder of that cluster if it runs already.

    Raises:
        UsageError: there would be too many; the message names the other clusters. Or the limit is not a number.
    """
    text = MAX_RANKS.get()
    if not text:
        return
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{MAX_RANKS.name} must be a number of ranks; got {text!r}. Ask the administrator to correct it."
        )
    others = dict(_ranks_of(besides))
    left = max(0, int(text) - sum(others.values()))
    if num_ranks <= left:
        return
    fewer = f"use {count_of(left, 'rank')} at most" if left else ""
    stop = " or ".join(f"{name!r} ({count_of(number, 'rank')})" for name, number in others.items())
    fixes = ", or ".join(filter(None, [fewer, f"stop {stop}; `axon-nb list` shows them" if others else ""]))
    raise UsageError(
        f"This host allows {count_of(int(text), 'rank')} per user ({MAX_RANKS.name}); got {num_ranks}"
        f"{f' besides {sum(others.values())} in other clusters' if others else ''}"
        f"{f': {fixes}' if fixes else ''}."
    )


def _ranks_of(besides: RunDir | None) -> Iterator[tuple[str, int]]:
    for run_dir in list_run_dirs():
        info = run_dir.read_info()
        if info.get("world_size") and (besides is None or run_dir.path != besides.path):
            yield str(info.get("name", "")), int(info["world_size"])


def files_needed(num_ranks: int) -> int:
    """Return the open files of the process that needs most, the controller: 107, 6 per rank, and a few to spare."""
    return 112 + 7 * num_ranks


def how_to_raise(hard: int, *, wanted: int) -> str:
    """Return one sentence that says how to raise a soft limit that is too low.

    Args:
        hard: The hard limit of this process.
        wanted: The lowest limit that suffices.
    """
    if hard == UNLIMITED or hard >= wanted:
        room = _MANY if hard == UNLIMITED else min(hard, _MANY)
        return f"Run `ulimit -n {room}` in the shell, then start Jupyter (or your script) from it."
    if container_kind() in ("docker", "podman"):
        return f"Start the container with `--ulimit nofile={_MANY}:{_MANY}`."
    where = "`nofile` in /etc/security/limits.conf or `LimitNOFILE=` of the service"
    return f"Raise the hard limit, with {where}." if sys.platform.startswith("linux") else "Raise the hard limit."


def raise_if_too_few(num_ranks: int) -> None:
    """Check this process's limit, which the processes of a cluster inherit, before any of them starts.

    Raises:
        StartError: it is too low for that many ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(num_ranks)
    if soft != UNLIMITED and soft < needed:
        ranks = "1 rank needs" if num_ranks == 1 else f"{num_ranks} ranks need"
        raise StartError(
            f"{ranks} {needed} open files, but the limit here is {soft}. {how_to_raise(hard, wanted=needed)}"
        )


def with_scheduler_options(hosts: str | None, gpus_per_rank: int | None, placement: str | None) -> str | None:
    """Return the option `--hosts` with what `--gpus-per-rank` and `--placement` say.

    Raises:
        UsageError: they are given with hosts that have no such option.
    """
    if gpus_per_rank is None and placement is None:
        return hosts
    launcher = "" if hosts is None else hosts.partition(":")[0]
    if launcher != "ray" and (launcher != "k8s" or placement is not None):
        raise UsageError("--gpus-per-rank and --placement are for --hosts ray; k8s has --gpus-per-rank, too.")
    values = {"gpus_per_rank": gpus_per_rank, "placement": placement}
    query = urllib.parse.urlencode({name: value for name, value in values.items() if value is not None})
    return f"{hosts}{'' if ':' in str(hosts) else ':'}?{query}"
