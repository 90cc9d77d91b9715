"""NCCL by itself: whether it is there, and its version.

Importable anywhere; each function raises `NcclError` with the reason where there is no NCCL or no GPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from axon_nb.comm.errors import NcclError

__all__ = ["is_available", "nccl_version", "why_not"]


def why_not() -> str:
    """Why NCCL cannot be used here; empty when it can."""
    if not dist.is_available() or not dist.is_nccl_available():
        return f"this build of torch ({torch.__version__}) has no NCCL: install one for CUDA, or use Backend.GLOO"
    if not torch.cuda.is_available():
        return "no CUDA device is visible here: use Backend.GLOO, or look at CUDA_VISIBLE_DEVICES"
    return ""


def is_available() -> bool:
    """Whether NCCL can be used here."""
    return not why_not()


def _require() -> None:
    if reason := why_not():
        raise NcclError(f"NCCL: {reason}.")


def nccl_version() -> tuple[int, int, int]:
    """NCCL's version: major, minor, patch.

    Raises:
        NcclError: there is no NCCL.
    """
    _require()
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major), int(minor), int(patch)
