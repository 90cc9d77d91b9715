"""A killed agent must not leave processes behind: the kernel of Linux signals them on its death."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int) -> None:
    """Have this process get the signal `number` when its parent dies; does nothing where there is no such service."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
