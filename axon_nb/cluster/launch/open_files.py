"""The limit of open files: how many a cluster needs, and how to raise it."""

from __future__ import annotations

import resource
import sys

from axon_nb.errors import StartError
from axon_nb.host.resources.container import container_kind

UNLIMITED = resource.RLIM_INFINITY
_MANY = 65536


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
