"""The cgroups that limit this process: its own and every one above it, for a limit on any of them counts."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CGROUPS", "OWN_CGROUP", "folders"]

CGROUPS = Path("/sys/fs/cgroup")
"""Where cgroups are mounted."""
OWN_CGROUP = Path("/proc/self/cgroup")
"""Lists the cgroups of this process, a line for each hierarchy."""


def folders(controller: str, *, root: Path = CGROUPS, own: Path = OWN_CGROUP) -> list[tuple[Path, int]]:
    """The folders of this process's cgroup and of all above it, lowest first, each with its version (1 or 2).

    In a container the listed path often is the host's, which is not mounted: such folders do not exist, and the topmost
    one is the container's own.

    Args:
        controller: Such as ``cpu`` or ``memory``.
        root: Where cgroups are mounted.
        own: A file like /proc/self/cgroup.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    found: list[tuple[Path, int]] = []
    for _, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if names == "":
            base, version = root, 2
        elif controller in names.split(","):
            mounts = [root / names, root / controller]  # "cpu,cpuacct", often with a link to it called "cpu"
            base, version = next((mount for mount in mounts if mount.is_dir()), root / controller), 1
        else:
            continue
        below = Path(path.lstrip("/"))
        if ".." in below.parts:  # the process was moved out of the container's namespace
            below = Path()
        found += [(base / part, version) for part in dict.fromkeys((below, *below.parents))]
    return found
