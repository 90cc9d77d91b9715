"""Letting go of what an ended cell held: its traceback keeps the locals of all frames, DataLoader workers included."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

__all__ = ["release_traceback"]

_NAMES = ("last_exc", "last_value", "last_traceback", "last_type")


def release_traceback(shell: Any) -> None:
    """Free the frames of the last cell's exception, in a thread: a DataLoader waits seconds for busy workers."""
    error = getattr(getattr(shell, "last_execution_result", None), "error_in_exec", None)
    if error is None:
        return
    for name in _NAMES:
        vars(sys).pop(name, None)
    threading.Thread(target=_clear, args=(error,), name="axon_nb-release", daemon=True).start()


def _clear(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)  # frames that still run are left alone
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
