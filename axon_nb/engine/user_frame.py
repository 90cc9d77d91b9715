"""Where the cell's own code begins on a stack. The notebook's side uses it too: nothing here imports torch."""

from __future__ import annotations

import os
from types import CodeType, FrameType

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["RUN_CODE", "user_frame"]

RUN_CODE: CodeType = InteractiveShell.run_code.__code__
"""The code object under which a cell's own frames run."""

_IPYTHON = f"{os.sep}IPython{os.sep}"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the cell itself on this stack: the one that IPython's `run_code` called; None outside a cell."""
    while frame is not None:
        caller = frame.f_back
        if caller is not None and caller.f_code is RUN_CODE and _IPYTHON not in frame.f_code.co_filename:
            return frame
        frame = caller
    return None
