"""What the user can do about a failure that the failure itself does not say.

Errors after which a rank's GPU is of no more use to it, told by their text: nothing but a new process helps.

Optional packages, and how to install them when a cell needs one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from axon_nb.cluster.failures.report import REPAIR, RankError
from axon_nb.records.protocol.cells import CellEnd
from axon_nb.records.ranks import format_ranks
from axon_nb.records.units import format_bytes

__all__ = ["context_hint", "hint_for", "lost_contexts", "missing_package", "shared_draws"]

_INSTALLED_BY = {
    "accelerate": "axon_nb[frameworks]",
    "cupy": "axon_nb[gpu]",
    "deepspeed": "axon_nb[frameworks]",
    "pynvml": "axon_nb[gpu]",
    "tensorboard": "tensorboard",
    "transformers": "axon_nb[frameworks]",
}


def missing_package(module: str) -> str:
    """Return one sentence with the fix for a missing module; empty if axon_nb does not know the module.

    Args:
        module: As ``ModuleNotFoundError.name`` has it.
    """
    if module.partition(".")[0] == "horovod":
        return "Horovod does not build against today's torch: `import axon_nb.compat.horovod as hvd` has its API."
    requirement = _INSTALLED_BY.get(module)
    if requirement is None:
        return ""
    return (
        f'`{module}` is not installed where the ranks run: `pip install "{requirement}"` there, and run the cell again.'
    )


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


def shared_draws(told: Mapping[int, CellEnd], ranks: Sequence[int]) -> str:
    """That ranks have drawn the same random numbers where copies of a model should not; empty where they have not.

    Args:
        told: What each rank has told at the end of the cell.
        ranks: The ranks of the cell.
    """
    draws = [told[rank].draws if rank in told else None for rank in ranks]
    first = draws[0] if draws else None
    if len(draws) < 2 or first is None or any(other is None or other.states != first.states for other in draws):
        return ""
    reasons = []
    if name := first.dropout:
        reasons.append(f"the dropout masks of `{name}` are the same on all of them")
    if name := first.loader:
        reasons.append(f"`{name}` shuffles alike, and all get the same batches without a `DistributedSampler`")
    if not reasons:
        return ""
    return (
        f"Hint: ranks {format_ranks(ranks)} have drawn the same random numbers: {', and '.join(reasons)}. "
        "`%distributed seed 0 --per-rank` gives each rank its own."
    )


# The errors that CUDA documents to leave the process in an inconsistent state. Out of memory is none of them.
_STICKY = (
    "an illegal instruction was encountered",
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "hardware stack error",
    "invalid program counter",
    "misaligned address",
    "operation not supported on global/shared address space",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "unspecified launch failure",
)


def lost_contexts(errors: Mapping[int, RankError]) -> list[int]:
    """The ranks whose error says that their CUDA context is lost."""
    return [
        rank
        for rank, error in sorted(errors.items())
        if error.kind == "raised" and "CUDA" in error.evalue and any(text in error.evalue for text in _STICKY)
    ]


def context_hint(errors: Mapping[int, RankError]) -> str:
    """What a lost CUDA context means and what to do; empty when none is lost."""
    ranks = lost_contexts(errors)
    if not ranks:
        return ""
    one = len(ranks) == 1
    return (
        f"{'Rank' if one else 'Ranks'} {format_ranks(ranks)} {'has' if one else 'have'} lost the CUDA context: every "
        f"further use of the GPU there fails, and {'its' if one else 'their'} tensors on it are gone. "
        f"`%distributed repair --ranks {format_ranks(ranks)}` replaces {'it' if one else 'them'}; "
        "the others keep all they have."
    )
