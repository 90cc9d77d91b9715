"""The machine: cores, memory, resource limits, network interfaces and GPUs, and what a default start would do."""

from __future__ import annotations

import contextlib
import glob
import ipaddress
import os
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from axon_nb.cluster.launch.placement import LOOPBACK, UNLIMITED, Layout, files_needed, how_to_raise, interface_ip
from axon_nb.doctor.installation import Answer, pip
from axon_nb.doctor.report import Finding, Section
from axon_nb.errors import StartError
from axon_nb.host import resources
from axon_nb.host.run_dir import base_dir
from axon_nb.records.units import format_bytes

_GIB = 1 << 30
_MIN_SHM_BYTES = 128 << 20
"""Docker's default of 64 MiB is less: a few batches of images fill it."""
_MIN_FREE_SHM_BYTES = 64 << 20
_MIN_FREE_DISK_BYTES = 64 << 20
_BASE_BYTES, _RANK_BYTES = 192 << 20, 64 << 20
"""Memory of a cluster without user data. Measured with torch 2.13 on CPUs: 130 MiB plus 40 MiB per rank."""
_LIMIT_AND_USAGE = {
    ("memory", 1): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory", 2): ("memory.max", "memory.current"),
    ("pids", 1): ("pids.max", "pids.current"),
    ("pids", 2): ("pids.max", "pids.current"),
}
"""Files by controller and version of cgroups."""
_V1_UNLIMITED = 1 << 60
"""Without a limit, version 1 reports the largest number of whole pages."""
_COMFORTABLE_FILES = 1024
NVML = ("-m", "axon_nb.host.nvml")
"""Python arguments of the child that queries the driver."""
_NCCL_FAULTS = {
    "2.17.1": "an abort can hang (pytorch#119215)",
    "2.25.1": "an abort can hang (pytorch#149153)",
    **dict.fromkeys((f"2.28.{patch}" for patch in range(3, 9)), "a restart can fail (NVIDIA's resiliency extension)"),
}
"""By version of NCCL: why recovery may fail with it."""
_NO_GPUS = "none; ranks compute on CPUs and communicate through shared memory"


def host(layout: Layout) -> Section:
    """Check cores, memory, shared memory and the folder for cluster files.

    Args:
        layout: The layout of a default start.
    """
    free = resources.free_memory()
    limit, _ = cgroup_limit("memory") or (None, 0)
    findings = (
        Finding("container", resources.container_kind() or "none"),
        _cores(),
        _memory(free, limit, layout),
        _shared_memory(Path("/dev/shm")),
        _run_folder(),
        _start_plan(layout),
    )
    data = {
        "container": resources.container_kind(),
        "cores": resources.usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": limit,
        "free_bytes": free,
        "default_ranks": layout.num_ranks,
    }
    return Section("host", findings, data)


def _start_plan(layout: Layout) -> Finding:
    on = ", ".join(dict.fromkeys(layout.devices))
    threads = f"{layout.threads} thread{'s' if layout.threads > 1 else ''} each"
    backend = {"shm": "shared memory", "gloo": "Gloo", "nccl": "NCCL"}[layout.backend]
    return Finding("default start", f"{layout.num_ranks} ranks on {on} with {backend}, {threads}")


def _cores() -> Finding:
    usable, total = resources.usable_cores(), os.cpu_count() or 1
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
    kind = resources.container_kind()
    return kubernetes if kind == "kubernetes" else docker if kind in ("docker", "podman") else otherwise


def cgroup_limit(
    controller: str, *, root: Path = resources.CGROUPS, own: Path = resources.OWN_CGROUP
) -> tuple[int, int] | None:
    """Limit and usage of that cgroup, this process's own or one above it, which has the least left; None: no limit.

    Args:
        controller: ``memory`` (bytes) or ``pids`` (tasks).
        root: Where cgroups are mounted.
        own: Which of them this process is in.
    """
    limits = []
    for folder, version in resources.cgroup_folders(controller, root=root, own=own):
        limit, used = (_read_number(folder / file) for file in _LIMIT_AND_USAGE[controller, version])
        if limit is not None and limit < _V1_UNLIMITED:
            limits.append((limit, used or 0))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=None)


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max" is not a number
        return None


def tasks_needed(num_ranks: int) -> int:
    """Threads that the cluster needs: 15 plus 13 per rank, with some reserve; DataLoader workers add more."""
    return 32 + 16 * num_ranks


def limits(num_ranks: int) -> Section:
    """Check the limits of this process, which its children inherit.

    Args:
        num_ranks: Number of ranks of a default start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = (_files(soft, hard, num_ranks), _tasks(num_ranks))
    data = {
        "open_files": {"soft": soft, "hard": hard, "needed": files_needed(num_ranks)},
        "tasks_needed": tasks_needed(num_ranks),
    }
    return Section(f"limits of {_whose()}", findings, data)


def _whose() -> str:
    return "this notebook's kernel" if "ipykernel.kernelapp" in sys.modules else "this shell"


def _files(soft: int, hard: int, num_ranks: int) -> Finding:
    needed = files_needed(num_ranks)
    value = f"{_limit_text(soft)} soft, {_limit_text(hard)} hard; {num_ranks} ranks need {needed}"
    wanted = max(needed, _COMFORTABLE_FILES)
    if soft == UNLIMITED or soft >= wanted:
        return Finding("open files", value)
    fix = how_to_raise(hard, wanted=wanted)
    if soft < needed:
        message = "`%distributed start` refuses to start that many: the cluster's controller would run out of them."
        return Finding("open files", value, "problem", message, fix)
    return Finding(
        "open files",
        value,
        "note",
        "Programs with many DataLoader workers, connections or GPUs may run out of them.",
        fix,
    )


def _tasks(num_ranks: int) -> Finding:
    """The tighter of the user's limit and the cgroup's, minus running tasks."""
    needed, user = tasks_needed(num_ranks), resource.getrlimit(resource.RLIMIT_NPROC)[0]
    group = cgroup_limit("pids")
    free: list[tuple[int, str]] = []
    shown = []
    if group is not None:
        limit, used = group
        shown.append(f"{limit} in the cgroup, {used} used")
        free.append((limit - used, _raise_group()))
    if user != UNLIMITED and os.geteuid() != 0:  # Linux does not hold root to it
        used = _tasks_of_user()
        shown.append(f"{user} for this user, {used} used")
        free.append((user - used, "Raise `ulimit -u` in the shell before you start Jupyter."))
    value = f"{'; '.join(shown) or 'no limit'}; {num_ranks} ranks need {needed}"
    left, fix = min(free, default=(needed, ""))
    if left >= needed:
        return Finding("threads", value)
    return Finding("threads", value, "problem", f"Only {max(0, left)} are free, so ranks fail to start.", fix)


def _raise_group() -> str:
    if resources.container_kind() in ("docker", "podman"):
        return "Start the container with a higher `--pids-limit`."
    return "Raise the cgroup's limit: `TasksMax=` of the systemd service, or the pod's process limit."


def _tasks_of_user() -> int:
    mine, count = os.getuid(), 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == mine:
                count += process.num_threads()
    return count


def _limit_text(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)


def network() -> Section:
    """Check loopback, and list interfaces with an IPv4 address that other hosts may reach."""
    interfaces, usual = _interfaces(), _outgoing_ip()
    findings = [_loopback()]
    for entry in interfaces:
        route = ", the default route" if entry["ip"] == usual else ""
        state = "up" if entry["up"] else "down"
        use = f"; for ranks on other hosts use `--interface {entry['name']}`" if entry["up"] else ""
        findings.append(Finding(str(entry["name"]), f"{entry['ip']}, {state}{route}{use}"))
    if not interfaces:
        findings.append(Finding("others", "none; ranks on other hosts cannot reach this host"))
    return Section("network", tuple(findings), {"host": socket.gethostname(), "interfaces": interfaces})


def _interfaces() -> list[dict[str, Any]]:
    stats = psutil.net_if_stats()
    interfaces = []
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET for address in addresses):
            ip = interface_ip(name)
            if not ipaddress.ip_address(ip).is_loopback:
                up = name in stats and bool(stats[name].isup)
                interfaces.append({"name": name, "ip": ip, "up": up})
    return interfaces


def _loopback() -> Finding:
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.socket() as client:
            client.settimeout(2.0)
            client.connect(server.getsockname())
    except OSError as error:
        return Finding(
            "loopback", f"{LOOPBACK} does not work: {error}", "problem",
            "Ranks on Gloo or NCCL cannot communicate, and launchers other than `axon` cannot start ranks.",
            "Run `ip link set lo up` as root.",
        )  # fmt: skip
    return Finding("loopback", f"{LOOPBACK} works; ranks on one host that use Gloo or NCCL need it")


def _outgoing_ip() -> str:
    """This host's default source address; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def gpus(nvml: Answer, build: Answer, owners: Mapping[int, str]) -> Section:
    """Report the GPUs, and what keeps ranks from using them.

    Args:
        nvml: Result of the child `NVML`.
        build: Result of the child `TORCH_BUILD`.
        owners: Display names of processes by pid: the ranks of this user's clusters.
    """
    facts: dict[str, Any] = dict(nvml.content)
    cards: list[dict[str, Any]] = facts.get("gpus") or []
    planned = resources.list_gpus()
    if cards:
        findings = [_driver(facts), *_nvidia_smi(planned), *(line for card in cards for line in _card(card, owners))]
    elif planned:
        findings = [*map(_plain_card, planned), *_no_nvml(nvml)]
    else:
        findings = [_absent(nvml)]
    if cards or planned:
        findings += _usable(build, facts)
    return Section("GPUs", tuple(findings), {**facts, "nccl": build.content.get("nccl")})


def _driver(facts: Mapping[str, Any]) -> Finding:
    return Finding("driver", f"{facts.get('driver') or 'unknown'} (CUDA up to {facts.get('cuda') or 'unknown'})")


def _nvidia_smi(planned: list[resources.Gpu]) -> list[Finding]:
    if planned or os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return []
    program = shutil.which("nvidia-smi")
    value = f"{program} lists no GPU" if program else "not on the PATH"
    fix = f"Run `{program}` to see why." if program else "Add the folder of `nvidia-smi` to the PATH of Jupyter."
    return [Finding("nvidia-smi", value, "problem", "`%distributed start` uses it to find GPUs, and finds none.", fix)]


def _card(card: Mapping[str, Any], owners: Mapping[int, str]) -> list[Finding]:
    label = f"GPU {card['index']}"
    if "error" in card:
        message = "The driver lost this GPU; no rank can use it."
        return [
            Finding(label, card["error"], "problem", message, "Restart the machine; the kernel log has the reason.")
        ]
    value = f"{card['name']}, {_gpu_memory(card)}"
    users = _gpu_users(card, owners)
    if users:
        value += f" by {users}"
    return [_gpu_state(label, value, card, owners), *(_instance(label, one, owners) for one in card["instances"])]


def _gpu_state(label: str, value: str, card: Mapping[str, Any], owners: Mapping[int, str]) -> Finding:
    number = card["index"]
    if card["mig"]:
        return Finding(
            label, f"{value}, MIG on with {len(card['instances'])} instances", "note",
            "Each rank uses one instance, and NCCL does not connect them: such ranks use Gloo.",
            f"To use all of it, run `nvidia-smi -i {number} -mig 0` as root while nothing runs on it.",
        )  # fmt: skip
    if card["exclusive"]:
        return Finding(
            label, f"{value}, exclusive mode", "note", "It accepts only one process: ranks cannot share it.",
            f"To share it, run `nvidia-smi -i {number} -c DEFAULT` as root.",
        )  # fmt: skip
    others = any(one["pid"] not in owners for one in card["processes"])
    used = resources.Gpu(number, "", card["total_bytes"] or 0, card["used_bytes"] or 0)
    if used.busy and (others or not card["processes"]):
        return Finding(
            label, value, "note", "`%distributed start` skips it while more than 512 MiB are in use.",
            f"Stop the processes that use it, or run `%distributed start --devices {number}` to use it anyway.",
        )  # fmt: skip
    return Finding(label, value)


def _instance(label: str, card: Mapping[str, Any], owners: Mapping[int, str]) -> Finding:
    users = _gpu_users(card, owners)
    return Finding(
        f"{label} MIG", f"{card['name']}, {_gpu_memory(card)}{f' by {users}' if users else ''}, {card['uuid']}"
    )


def _gpu_memory(card: Mapping[str, Any]) -> str:
    if card["total_bytes"] is None:
        return "memory shared with the host"
    return f"{format_bytes(card['used_bytes'])} of {format_bytes(card['total_bytes'])} used"


def _gpu_users(card: Mapping[str, Any], owners: Mapping[int, str]) -> str:
    parts = []
    for one in card["processes"]:
        used = one["used_bytes"]
        name = owners.get(one["pid"]) or _gpu_name(one["pid"])
        parts.append(f"{name} (pid {one['pid']}{f', {format_bytes(used)}' if used else ''})")
    return ", ".join(parts)


def _gpu_name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "a process not visible here"


def _plain_card(gpu: resources.Gpu) -> Finding:
    used = f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} used"
    return Finding(f"GPU {gpu.index}", f"{gpu.name}, {used if gpu.total_bytes else 'memory unknown'}")


def _no_nvml(nvml: Answer) -> list[Finding]:
    """Explain why NVML shows nothing although nvidia-smi does."""
    if nvml.content.get("package") is False:
        message = "Without it doctor cannot show MIG instances or the processes that use GPUs."
        return [Finding("nvidia-ml-py", "missing", "note", message, f"Run `{pip()} install nvidia-ml-py`.")]
    why = nvml.failure or nvml.content.get("error") or "finds no GPU"
    return [Finding("NVML", why, "note", "nvidia-smi still lists GPUs.", "Run `nvidia-smi -q` for details.")]


def _absent(nvml: Answer) -> Finding:
    """No GPU is visible: find out whether there may still be one."""
    nodes = sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg"))
    error, here = nvml.content.get("error") or nvml.failure, bool(nvml.content.get("libcuda"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if nodes and nvml.content.get("package") is False:
        return Finding(
            "NVIDIA", f"{', '.join(nodes)} exist, but neither nvidia-smi nor nvidia-ml-py is installed", "problem",
            "`%distributed start` uses nvidia-smi to find GPUs, and finds none.",
            "Install the driver's utilities, which include `nvidia-smi`, then run doctor again.",
        )  # fmt: skip
    if nodes or error:
        there = f"{', '.join(nodes)} exist, but " if nodes else ""
        fix = "Run `nvidia-smi` to see why."
        if error and "mismatch" in error.lower():
            fix = "Restart the machine: the driver was updated while its old version was loaded."
        return Finding(
            "NVIDIA", f"{there}NVML finds none: {error or 'no driver library'}", "problem" if nodes else "note",
            "Ranks compute on CPUs.", fix,
        )  # fmt: skip
    if here and resources.container_kind() in ("docker", "podman"):
        return Finding(
            "NVIDIA", "none, although libcuda is installed", "note", "Ranks compute on CPUs.",
            "If the host has GPUs, start the container with `--gpus all`.",
        )  # fmt: skip
    return Finding("NVIDIA", f"{_NO_GPUS} (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else _NO_GPUS)


def _nccl(version: str | None) -> Finding:
    if version is None:
        return Finding("NCCL", "none in this torch")
    if fault := _NCCL_FAULTS.get(version):
        return Finding(
            "NCCL", version, "note", f"With this version {fault}, so `repair` may be needed more often.",
            "Install a torch with another version of NCCL.",
        )  # fmt: skip
    return Finding("NCCL", version)


def _usable(build: Answer, facts: Mapping[str, Any]) -> list[Finding]:
    """Check whether torch can use the GPUs."""
    torch = build.content
    if not torch:
        return []
    nccl = _nccl(torch["nccl"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch["cuda"]:
        return [
            Finding(
                "torch", f"{torch['torch']} is built without CUDA", "problem", "Ranks cannot use the GPUs.",
                "Install a build of torch for CUDA "
                f"{facts.get('cuda') or 'that the driver supports'} or older, then restart the kernel.",
            )
        ]  # fmt: skip
    if torch["gpus"]:
        return [nccl]
    if visible is not None and not resources.list_gpus():
        fix = "Unset CUDA_VISIBLE_DEVICES before you start Jupyter."
        if visible.startswith("MIG-"):
            fix = "Set it to a MIG instance that `nvidia-smi -L` lists, or unset it, where Jupyter is started."
        return [nccl, Finding("visible", f"CUDA_VISIBLE_DEVICES={visible!r}", "note", "It hides all GPUs.", fix)]
    warning = next((line.strip() for line in build.stderr.splitlines() if "CUDA" in line or "driver" in line), "")
    if "too old" in warning:
        fix = f"Update the NVIDIA driver, or install a build of torch for CUDA {facts.get('cuda') or '(see driver)'}."
    else:
        fix = 'Run `python -c "import torch; torch.cuda.init()"` to see why.'
    value = warning or "torch.cuda.is_available() is False"
    return [nccl, Finding("torch", value, "problem", "Ranks cannot use the GPUs.", fix)]
