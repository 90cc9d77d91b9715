"""What the user can do about a failure that the failure itself does not say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from axon_nb.cluster.failures import REPAIR
from axon_nb.cluster.result import RankError
from axon_nb.records.quantity import format_bytes

__all__ = ["hint_for"]

_NO_SHARED_MEMORY = re.compile(r"unable to (allocate|mmap|open|write) .*shared memory|out of shared memory|Bus error")


def hint_for(errors: Iterable[RankError]) -> str:
    """A sentence or two, empty where there is nothing to add."""
    hints = []
    everything = list(errors)
    if {error.kind for error in everything} & {"died", "stuck"}:
        hints.append(REPAIR)
    if any(_NO_SHARED_MEMORY.search(error.evalue) for error in everything):
        hints.append(
            f"Shared memory is full: /dev/shm holds {_size('/dev/shm')}, and DataLoader workers hand over their "
            "batches in it. Use `num_workers=0`, or give it more: `docker run --shm-size=2g`, or "
            "`mount -o remount,size=2g /dev/shm`."
        )
    return " ".join(hints)


def _size(folder: str) -> str:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return "nothing"
    return format_bytes(facts.f_blocks * facts.f_frsize)
