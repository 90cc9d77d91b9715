"""What a notebook and its ranks have in common as IPython shells: here, the frames of user code on a stack.

Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import os
import re
from types import CodeType, FrameType

from IPython.core.interactiveshell import InteractiveShell

from axon_nb.records.stacks import library_of

RUN_CODE: CodeType = InteractiveShell.run_code.__code__
"""The code object under which a cell's own frames run."""
_CELL_FILE = re.compile(r"<ipython-input-(\d+)-\w+>")
_NOT_NAMED = frozenset({"IPython", "Python", "axon_nb", "ipykernel", "ipyparallel", "torch", "typing_extensions"})
_IPYTHON = f"{os.sep}IPython{os.sep}"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The cell's own frame on this stack, called by IPython's `run_code`; None outside a cell."""
    while frame is not None:
        caller = frame.f_back
        if caller is not None and caller.f_code is RUN_CODE and _IPYTHON not in frame.f_code.co_filename:
            return frame
        frame = caller
    return None


def inner_function(frame: FrameType | None, cell: FrameType | None) -> str:
    """Describe the innermost function of the user between `frame` and the frame of the cell; see `describe_inner`.

    A library that it calls, and that calls torch, is named, too: `` (step, line 3, by torchmetrics)``.
    """
    library = ""
    while frame is not None and frame is not cell:
        package = library_of(frame.f_code.co_filename)
        if not package:
            inner = describe_inner(frame.f_code, frame.f_lineno, "" if cell is None else cell.f_code.co_filename)
            return f"{inner[:-1]}, by {library})" if library else inner
        if package not in _NOT_NAMED:
            library = package
        frame = frame.f_back
    return f" (by {library})" if library and frame is not None else ""


def describe_inner(code: CodeType, line: int, cell_file: str) -> str:
    """Describe a function that a cell has called: `` (step, train.py line 40)``, or `` (step, line 3)`` in the cell."""
    name = "" if code.co_name.startswith("<") else f"{code.co_name}, "
    file = code.co_filename
    file = "" if file == cell_file else f"{cell_of_file(file) or os.path.basename(file).strip('<>')} "
    return f" ({name}{file}line {line})"


def cell_of_file(filename: str) -> str:
    """Return the cell whose code has this file name, such as ``Cell In[3]``; empty if it is another file."""
    found = _CELL_FILE.fullmatch(filename)
    return f"Cell In[{found[1]}]" if found else ""
