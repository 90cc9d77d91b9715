"""Whether the main thread waits for its GPU: in which call, read off its stack.

On NCCL a collective is only put into the GPU's queue. The thread stops later, where it needs a value.
"""

from __future__ import annotations

import dis
import os
from types import CodeType, FrameType

__all__ = ["waits_in"]

# No argument, or one: calls that return only when the GPU has done what was asked before.
_WAITING_CALLS = frozenset({"__bool__", "cpu", "item", "numpy", "synchronize", "to", "tolist"})
_CUDA_FILES = (os.path.join("torch", "cuda", "__init__.py"), os.path.join("torch", "cuda", "streams.py"))


def waits_in(frame: FrameType | None) -> str:
    """The call that waits for the GPU and that the innermost `frame` is in, such as ``item``; empty when it is none.

    It says where the thread is, not that it is stuck: a computation in Python gives an empty answer.
    """
    if frame is None:
        return ""
    code = frame.f_code
    if code.co_name == "synchronize" and code.co_filename.endswith(_CUDA_FILES):
        return "synchronize"
    called = _called(code, frame.f_lasti)
    return called if called in _WAITING_CALLS else ""


def _called(code: CodeType, offset: int) -> str:
    """Name of the method or function that the instruction at `offset` calls; empty when it calls none by name."""
    attribute = called = ""
    for instruction in dis.get_instructions(code):
        if instruction.offset > offset:  # what follows an instruction as its cache counts as the instruction
            break
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            attribute = str(instruction.argval)
        called = attribute if instruction.opname.startswith("CALL") else ""
    return called
