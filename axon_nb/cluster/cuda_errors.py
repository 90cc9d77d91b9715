"""Errors after which a rank's GPU is of no more use to it, told by their text: nothing but a new process helps."""

from __future__ import annotations

from collections.abc import Mapping

from axon_nb.cluster.failures import RankError
from axon_nb.records.ranks import format_ranks

__all__ = ["context_hint", "lost_contexts"]

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
