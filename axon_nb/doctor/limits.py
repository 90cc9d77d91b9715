"""Resource limits of this process and its children: open files, processes, threads."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

import psutil

from axon_nb.cluster.launch.open_files import UNLIMITED, files_needed, how_to_raise
from axon_nb.doctor import container
from axon_nb.doctor.report import Finding, Section
from axon_nb.host.resources.container import container_kind

_COMFORTABLE_FILES = 1024


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
    value = f"{_number(soft)} soft, {_number(hard)} hard; {num_ranks} ranks need {needed}"
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
    group = container.cgroup_limit("pids")
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
    if container_kind() in ("docker", "podman"):
        return "Start the container with a higher `--pids-limit`."
    return "Raise the cgroup's limit: `TasksMax=` of the systemd service, or the pod's process limit."


def _tasks_of_user() -> int:
    mine, count = os.getuid(), 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == mine:
                count += process.num_threads()
    return count


def _number(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)
