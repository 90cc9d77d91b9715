"""What the user can do about a failure that the failure itself does not say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axon_nb.cluster.failures import REPAIR, RankError
from axon_nb.records.extras import missing_package
from axon_nb.records.quantity import format_bytes
from axon_nb.records.ranks import format_ranks

__all__ = ["hint_for", "shared_draws"]

_NO_SHARED_MEMORY = re.compile(r"unable to (allocate|mmap|open|write) .*shared memory|out of shared memory|Bus error")
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_COMPILER = re.compile(r"No working C\+\+ compiler|Ninja is required to load C\+\+|ninja not being installed")


def hint_for(errors: Iterable[RankError], *, way_back: str = REPAIR) -> str:
    """A sentence or two, empty where there is nothing to add; `way_back`: `Health.way_back`."""
    hints: list[str] = []
    everything = list(errors)
    wanted = [_NO_MODULE.search(error.evalue) for error in everything if error.ename == "ModuleNotFoundError"]
    hints += dict.fromkeys(sentence for found in wanted if found and (sentence := missing_package(found[1])))
    if any(_NO_COMPILER.search(error.evalue) for error in everything):
        hints.append("C++ is compiled here: install a compiler (`apt install g++`) and ninja (`pip install ninja`).")
    if {error.kind for error in everything} & {"died", "stuck"}:
        hints.append(way_back)
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


def shared_draws(told: Mapping[int, Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """That ranks have drawn the same random numbers where copies of a model should not; empty where they have not.

    Args:
        told: What each rank has told at the end of the cell; ``draws`` as `axon_nb.engine.randomness` has it.
        ranks: The ranks of the cell.
    """
    draws = [told.get(rank, {}).get("draws") for rank in ranks]
    first = draws[0] if draws else None
    if len(draws) < 2 or not first or any(not other or other["states"] != first["states"] for other in draws):
        return ""
    reasons = []
    if name := first["dropout"]:
        reasons.append(f"the dropout masks of `{name}` are the same on all of them")
    if name := first["loader"]:
        reasons.append(f"`{name}` shuffles alike, and all get the same batches without a `DistributedSampler`")
    if not reasons:
        return ""
    return (
        f"Hint: ranks {format_ranks(ranks)} have drawn the same random numbers: {', and '.join(reasons)}. "
        "`%distributed seed 0 --per-rank` gives each rank its own."
    )
