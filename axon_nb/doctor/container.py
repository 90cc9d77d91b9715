"""Which container this runs in, for the fix of a limit is another one in each; and the limits of its cgroup."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["cgroup_limit", "cgroup_usage", "kind"]

_V1_UNLIMITED = 1 << 60
"""Without a limit version 1 tells the largest number of whole pages."""


def kind() -> str:
    """``kubernetes``, ``docker``, ``podman``, ``apptainer``, or empty: no container that is known."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if Path("/.dockerenv").exists() else ""


def cgroup_limit(
    controller: str, *, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The lowest limit of this process's cgroup and those above it; None: there is none.

    Args:
        controller: ``memory`` (bytes) or ``pids`` (tasks).
        root: Where cgroups are mounted.
        own: Which of them this process is in.
    """
    file = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max", "pids.max")}[controller]
    limits = []
    for folder, version in _folders(controller, root, own):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limits.append(int((folder / file[version - 1]).read_text()))
    return min((limit for limit in limits if limit < _V1_UNLIMITED), default=None)


def cgroup_usage(
    controller: str, *, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """How much of the limit this process's own cgroup uses; None: nobody tells."""
    file = {"memory": ("memory.current", "memory.usage_in_bytes"), "pids": ("pids.current", "pids.current")}[controller]
    for folder, version in _folders(controller, root, own):
        with contextlib.suppress(OSError, ValueError):
            return int((folder / file[version - 1]).read_text())
    return None


def _folders(controller: str, root: Path, own: Path) -> list[tuple[Path, int]]:
    """This process's cgroup folder and all above it, lowest first, each with its version (1 or 2)."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, int]] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "" and (root / "cgroup.controllers").exists():
            base, version = root, 2
        elif controller in names.split(","):
            base, version = root / controller, 1
        else:
            continue
        below = Path(path.lstrip("/"))
        found += [(base / part, version) for part in (below, *below.parents)]
    return found
