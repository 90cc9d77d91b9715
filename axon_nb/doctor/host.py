"""The host: cores, memory, shared memory, and what a default start would do."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from axon_nb.cluster.launch.placement import Layout
from axon_nb.doctor import container
from axon_nb.doctor.report import Finding, Section
from axon_nb.errors import StartError
from axon_nb.host.resources.cgroups import free_memory, usable_cores
from axon_nb.host.resources.container import container_kind
from axon_nb.host.run_dir import base_dir
from axon_nb.records.units import format_bytes

_GIB = 1 << 30
_MIN_SHM_BYTES = 128 << 20
"""Docker's default of 64 MiB is less: a few batches of images fill it."""
_MIN_FREE_SHM_BYTES = 64 << 20
_MIN_FREE_DISK_BYTES = 64 << 20
_BASE_BYTES, _RANK_BYTES = 192 << 20, 64 << 20
"""Memory of a cluster without user data. Measured with torch 2.13 on CPUs: 130 MiB plus 40 MiB per rank."""


def host(layout: Layout) -> Section:
    """Check cores, memory, shared memory and the folder for cluster files.

    Args:
        layout: The layout of a default start.
    """
    free = free_memory()
    limit, _ = container.cgroup_limit("memory") or (None, 0)
    findings = (
        Finding("container", container_kind() or "none"),
        _cores(),
        _memory(free, limit, layout),
        _shared_memory(Path("/dev/shm")),
        _run_folder(),
        _plan(layout),
    )
    data = {
        "container": container_kind(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": limit,
        "free_bytes": free,
        "default_ranks": layout.num_ranks,
    }
    return Section("host", findings, data)


def _plan(layout: Layout) -> Finding:
    on = ", ".join(dict.fromkeys(layout.devices))
    threads = f"{layout.threads} thread{'s' if layout.threads > 1 else ''} each"
    backend = {"shm": "shared memory", "gloo": "Gloo", "nccl": "NCCL"}[layout.backend]
    return Finding("default start", f"{layout.num_ranks} ranks on {on} with {backend}, {threads}")


def _cores() -> Finding:
    usable, total = usable_cores(), os.cpu_count() or 1
    by_affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quota = f"{usable} by the cgroup's quota" if usable < by_affinity else "no quota in the cgroup"
    value = f"{usable} usable ({total} in the machine, {by_affinity} by affinity, {quota})"
    if usable > 1 or total == 1:
        return Finding("cores", value)
    fix = "Widen the process's CPU affinity, for example with `taskset` or Slurm's `--cpus-per-task`."
    if usable < by_affinity:
        fix = _in_container(
            "Start the container with `--cpus=4`.", "Raise the pod's CPU limit.", "Raise the CPU quota."
        )
    return Finding("cores", value, "note", "All ranks share one core.", fix)


def _memory(free: int | None, limit: int | None, layout: Layout) -> Finding:
    total = psutil.virtual_memory().total
    bound = f", the cgroup's limit is {format_bytes(limit)}" if limit is not None and limit < total else ""
    value = f"{format_bytes(total)}, {'unknown' if free is None else format_bytes(free)} available{bound}"
    needed = _BASE_BYTES + layout.num_ranks * _RANK_BYTES
    if free is None or free >= needed:
        return Finding("memory", value)
    fix = f"Close other programs, or start fewer ranks with `%distributed start -n {max(1, layout.num_ranks // 2)}`."
    if bound:
        fix = _in_container("Start the container with a higher `--memory`.", "Raise the pod's memory limit.", fix)
    message = f"{layout.num_ranks} ranks need about {format_bytes(needed)} before any data."
    return Finding("memory", value, "problem", message, fix)


def _shared_memory(folder: Path) -> Finding:
    try:
        facts = os.statvfs(folder)
    except OSError:
        if not Path("/proc/mounts").exists():
            return Finding("/dev/shm", "none on this system, and not needed")
        return Finding(
            "/dev/shm", "missing", "problem", "DataLoader workers and NCCL need it.",
            "Run `mkdir -p /dev/shm && mount -t tmpfs -o size=1g tmpfs /dev/shm` as root.",
        )  # fmt: skip
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    value = f"{format_bytes(size)}, {format_bytes(free)} free"
    larger = _in_container(
        "Start the container with `--shm-size=1g`, as in `docker run --shm-size=1g IMAGE`.",
        "Mount an `emptyDir` with `medium: Memory` at /dev/shm in the pod.",
        "Run `mount -o remount,size=1g /dev/shm` as root.",
    )
    if not os.access(folder, os.W_OK):
        return Finding(
            "/dev/shm", f"{value}, not writable", "problem", "DataLoader workers and NCCL need it.",
            "Run `chmod 1777 /dev/shm` as root.",
        )  # fmt: skip
    fills = "DataLoader workers and NCCL pass data through it, and fail when it is full."
    if size < _MIN_SHM_BYTES:
        return Finding("/dev/shm", f"only {value}", "problem", fills, larger)
    if free < _MIN_FREE_SHM_BYTES:
        return Finding("/dev/shm", value, "problem", fills, "Delete unused files; `ls -lS /dev/shm` lists them.")
    if size < _GIB:
        return Finding("/dev/shm", value, "note", "It is enough for small batches only. " + fills, larger)
    return Finding("/dev/shm", value)


def _run_folder() -> Finding:
    try:
        folder = base_dir()
        facts = os.statvfs(folder)
    except StartError as error:
        _, _, fix = str(error).partition("). ")
        return Finding("cluster files", str(error), "problem", "No cluster can start.", fix)
    except OSError as error:
        return Finding("cluster files", str(error), "problem", "No cluster can start.", "Set AXON_NB_RUNTIME_DIR.")
    free = facts.f_bavail * facts.f_frsize
    value = f"{folder}, {format_bytes(free)} free"
    if free < _MIN_FREE_DISK_BYTES:
        fix = "Free space there, or set AXON_NB_RUNTIME_DIR to a short path on another local disk."
        return Finding("cluster files", value, "problem", "The ranks' logs do not fit.", fix)
    return Finding("cluster files", value)


def _in_container(docker: str, kubernetes: str, otherwise: str) -> str:
    kind = container_kind()
    return kubernetes if kind == "kubernetes" else docker if kind in ("docker", "podman") else otherwise
