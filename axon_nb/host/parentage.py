"""Parent death signal: Linux signals the children of a killed agent, so that none is left behind."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["set_parent_death_signal"]

_PR_SET_PDEATHSIG = 1


def set_parent_death_signal(number: int) -> None:
    """Request the signal `number` for this process when its parent dies (Linux only; elsewhere a no-op)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
