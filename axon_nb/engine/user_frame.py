"""Finds the frame of the cell itself on a stack. The notebook uses it too, so nothing here imports torch."""

from __future__ import annotations

import os
from types import CodeType, FrameType

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["RUN_CODE", "user_frame"]

RUN_CODE: CodeType = InteractiveShell.run_code.__code__
"""The code object under which a cell's own frames run."""

_IPYTHON = f"{os.sep}IPython{os.sep}"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The cell's own frame on this stack, called by IPython's `run_code`; None outside a cell."""
    while frame is not None:
        caller = frame.f_back
        if caller is not None and caller.f_code is RUN_CODE and _IPYTHON not in frame.f_code.co_filename:
            return frame
        frame = caller
    return None
