"""What this process and those that it starts may have: open files, processes, threads."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

import psutil

from axon_nb.doctor import container
from axon_nb.doctor.report import Finding, Section

__all__ = ["files_needed", "limits", "tasks_needed"]

_UNLIMITED = resource.RLIM_INFINITY
_COMFORTABLE_FILES = 1024


def files_needed(num_ranks: int) -> int:
    """Open files of the cluster's hungriest process, the controller: 107, and 6 a rank, and a few to spare."""
    return 112 + 7 * num_ranks


def tasks_needed(num_ranks: int) -> int:
    """Threads of all of the cluster's processes: 15, and 13 a rank; more with DataLoader workers."""
    return 32 + 16 * num_ranks


def limits(num_ranks: int) -> Section:
    """Limits of this process, which its children inherit.

    Args:
        num_ranks: Of a start without options.
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
    value = f"{_number(soft)} soft, {_number(hard)} hard; {num_ranks} ranks need {files_needed(num_ranks)}"
    if soft == _UNLIMITED or soft >= _COMFORTABLE_FILES:
        return Finding("open files", value)
    if hard == _UNLIMITED or hard >= _COMFORTABLE_FILES:
        room = 65536 if hard == _UNLIMITED else min(hard, 65536)
        fix = f"Run `ulimit -n {room}` in the shell that starts Jupyter, before it does."
    elif container.kind() in ("docker", "podman"):
        fix = "Start the container with `--ulimit nofile=65536:65536`."
    elif sys.platform.startswith("linux"):
        fix = "Raise the hard limit, with `nofile` in /etc/security/limits.conf or `LimitNOFILE=` of the service."
    else:
        fix = "Raise the hard limit of the shell that starts Jupyter."
    if soft < files_needed(num_ranks):
        message = "The cluster's controller runs out of them, at the start or soon after."
        return Finding("open files", value, "problem", message, fix)
    return Finding(
        "open files", value, "note", "Programs with many DataLoader workers, connections or GPUs run out of them.", fix
    )


def _tasks(num_ranks: int) -> Finding:
    """The lower of the user's limit and the cgroup's, less what runs already."""
    needed, user = tasks_needed(num_ranks), resource.getrlimit(resource.RLIMIT_NPROC)[0]
    group = container.cgroup_limit("pids")
    free: list[tuple[int, str]] = []
    shown = []
    if group is not None:
        limit, used = group
        shown.append(f"{limit} in the cgroup, {used} used")
        free.append((limit - used, _raise_group()))
    if user != _UNLIMITED and os.geteuid() != 0:  # Linux does not hold root to it
        used = _tasks_of_user()
        shown.append(f"{user} for this user, {used} used")
        free.append((user - used, "Raise `ulimit -u` in the shell that starts Jupyter, before it does."))
    value = f"{'; '.join(shown) or 'no limit'}; {num_ranks} ranks need {needed}"
    left, fix = min(free, default=(needed, ""))
    if left >= needed:
        return Finding("threads", value)
    return Finding("threads", value, "problem", f"Only {max(0, left)} are free, and ranks fail to start.", fix)


def _raise_group() -> str:
    if container.kind() in ("docker", "podman"):
        return "Start the container with a higher `--pids-limit`."
    return "Raise the limit of the cgroup: `TasksMax=` of the systemd service, or the pod's limit of processes."


def _tasks_of_user() -> int:
    mine, count = os.getuid(), 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == mine:
                count += process.num_threads()
    return count


def _number(value: int) -> str:
    return "unlimited" if value == _UNLIMITED else str(value)
