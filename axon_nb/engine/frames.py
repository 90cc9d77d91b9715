"""Reads stacks: frames of other threads without crashing the process, optimizer steps and communication calls in them.

CPython creates a frame's object on demand. Before 3.12, that allocation may trigger a garbage collection, which runs
Python and so may let the main thread go on. The requested frame may be gone when its object is ready, and the next
access crashes the process (SIGSEGV, seen with 3.11.7 within a second; https://github.com/python/cpython/issues/111363).
Or the collection waits forever for a lock that `_current_frames` itself holds
(https://github.com/python/cpython/issues/106883). So garbage collection is paused meanwhile.

Private hook into torch: the wrapper that every optimizer's `step` runs in. Without it no step is found, so an interrupt
may leave one half done.

Calls are named as users know them (``all_reduce at line 2``, ``full_tensor at line 4``): torch's public functions, and
library functions that communicate implicitly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

import torch.distributed as dist

from axon_nb.compat.deepspeed import STEP_CODE
from axon_nb.records.stacks import fsdp_unit
from axon_nb.records.waits import COLLECTIVE_FUNCTIONS, PUBLIC_NAMES
from axon_nb.shell import inner_function, user_frame

_COLLECTS_ON_ALLOCATION = sys.version_info < (3, 12)
"""Later versions collect only between two instructions."""
_pause_lock = threading.RLock()
# A process forked during a pause would never collect again.
os.register_at_fork(before=_pause_lock.acquire, after_in_parent=_pause_lock.release, after_in_child=_pause_lock.release)
_CALL_FILES = tuple(
    os.path.join(*place)
    for place in (
        ("torch", "distributed", "distributed_c10d.py"),
        ("axon_nb", "comm", "collectives", "direct.py"),
    )
)
PUBLIC_CALLS = frozenset(name for name in dist.distributed_c10d.__all__ if name.islower())
"""Functions of torch.distributed that users recognise as the call a rank waits in."""
_STORE_FILE = os.path.join("axon_nb", "engine", "groups", "store.py")
_HOROVOD = os.path.join("axon_nb", "compat", "horovod", "")
_HOROVOD_CALLS = frozenset(
    {
        *("allgather", "allreduce", "alltoall", "broadcast", "broadcast_object", "broadcast_optimizer_state"),
        *("broadcast_parameters", "init", "join", "step", "synchronize"),
    }
)
"""Functions of `axon_nb.compat.horovod` and methods of its optimizer."""
_LIBRARIES = tuple(
    f"{os.sep}{package}{os.sep}{folder}{os.sep}"
    for package, folder in (("torch", "distributed"), ("torch", "nn"), ("axon_nb", "parallel"))
)
_DDP_FILE = os.path.join("torch", "nn", "parallel", "distributed.py")
_FORWARD = "the forward pass of an FSDP model"
_LAYER = "the forward pass of a tensor-parallel layer"
_RENAMED = {
    "_pre_forward": _FORWARD,
    "_prepare_input_fn": _LAYER,
    "_prepare_out_fn": _LAYER,
    "_prepare_output_fn": _LAYER,
    "_root_pre_forward": _FORWARD,
    "clip_grad_norm": "clip_grad_norm_",
}
_SINGLE_OPERATIONS = frozenset({"all_reduce", "barrier", "broadcast", "gather", "reduce", "scatter"})
"""Calls that make the operation of their name and no other."""
_NON_BLOCKING = frozenset({"batch_isend_irecv", "irecv", "isend"})
# Names differ between versions of torch (`_allgather_base` became `all_gather_single`), and newer ones have more.
_OPERATION = re.compile("_?(all|barrier|broadcast|gather|recv|reduce|scatter|send)")


@contextlib.contextmanager
def gc_paused(*, on_main: bool = False) -> Iterator[None]:
    """Pause garbage collection for a moment; a no-op since Python 3.12, and on the main thread unless `on_main`."""
    if not _COLLECTS_ON_ALLOCATION or (not on_main and threading.current_thread() is threading.main_thread()):
        yield
        return
    with _pause_lock:  # otherwise the first thread to leave would re-enable it for the second
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread; its `f_back` chain can be followed safely at any later time."""
    with gc_paused():
        innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:  # a frame keeps its object for as long as it runs
            frame = frame.f_back
    return innermost


def code_by_thread() -> dict[int, list[CodeType]]:
    """The code that each thread runs, by thread ident, innermost first."""
    codes: dict[int, list[CodeType]] = {}
    with gc_paused():
        for ident, innermost in sys._current_frames().items():
            frame: FrameType | None = innermost
            codes[ident] = []
            while frame is not None:
                codes[ident].append(frame.f_code)
                frame = frame.f_back
    return codes


@functools.cache
def _wrapper_code() -> CodeType | None:
    from torch.optim import Optimizer

    hook = getattr(Optimizer, "profile_hook_step", None)
    # All wrappers share one code object.
    return getattr(hook(lambda self: None), "__code__", None) if hook is not None else None


def step_wrapper_problems() -> list[str]:
    """Return what is missing if the wrapper of `step` has no code object; else nothing."""
    return [] if _wrapper_code() is not None else ["torch.optim.Optimizer.profile_hook_step(step).__code__"]


def step_depth(frame: FrameType | None) -> int:
    """Count the steps on this stack: 2 in an optimizer that steps another, such as ZeroRedundancyOptimizer."""
    depth, step = 0, _wrapper_code()
    while frame is not None:
        depth += frame.f_code is step or frame.f_code is STEP_CODE
        frame = frame.f_back
    return depth


def is_cell(code: CodeType) -> bool:
    """Whether this is code of a cell, or of a file, outside of functions: IPython 7.34 names a cell by its line."""
    return code.co_name == "<module>" or code.co_name.startswith("<cell line: ")


def is_public_call(code: CodeType) -> bool:
    """Whether `code` is a communication function that users know by name."""
    if code.co_name in _HOROVOD_CALLS and _HOROVOD in code.co_filename:
        return True
    if code.co_filename.endswith(_STORE_FILE):
        return code.co_name == "init_rpc" or code.co_name.startswith("store.")
    return code.co_name in PUBLIC_CALLS and code.co_filename.endswith(_CALL_FILES)


def find_implicit_collective(frame: FrameType | None, stop: FrameType | None = None) -> str:
    """Name the outermost library function below the cell's frame `stop` that communicates implicitly; empty if none.

    Outermost, because a `get_model_state_dict` that calls `full_tensor` is what the user wrote.
    """
    match = ""
    while frame is not None and frame is not stop:
        name = _RENAMED.get(frame.f_code.co_name, frame.f_code.co_name)
        if name == _FORWARD and frame.f_code.co_filename.endswith(_DDP_FILE):
            name = "the forward pass of a DDP model"
        if name in COLLECTIVE_FUNCTIONS and any(part in frame.f_code.co_filename for part in _LIBRARIES):
            match = name
        frame = frame.f_back
    return match


def public_call(frame: FrameType | None) -> tuple[str, bool]:
    """Find the outermost function of torch.distributed on the stack; return its name and whether it blocks."""
    call, blocks = "", False
    while frame is not None:
        code = frame.f_code
        if is_public_call(code):
            call = code.co_name
            blocks = call not in _NON_BLOCKING and not frame.f_locals.get("async_op", False)
        frame = frame.f_back
    return call, blocks


def describe_awaited_call(name: str, line: int = 0) -> str:
    """Describe the call behind the group operation `name`, which a helper thread may make for the main thread.

    Args:
        name: The operation, such as ``all_reduce``.
        line: Line of user code that started it; 0: unknown. The main thread may be in a later call by now.

    Returns:
        The call with its line; empty if it is not known.
    """
    if user_frame(sys._getframe(1)) is not None:
        return describe_call(name)
    frame = main_frame()
    user = user_frame(frame)
    if user is None or line not in (0, user.f_lineno):
        return ""
    call = find_implicit_collective(frame, user) or public_call(frame)[0]
    if call in _SINGLE_OPERATIONS and call != name:
        return ""
    return f"{call} at line {user.f_lineno}{inner_function(frame, user)}{_of_unit(frame)}" if call else ""


def describe_call(name: str) -> str:
    """Describe the call that the current thread is making, for the group operation `name`."""
    frame = sys._getframe(1)
    user = user_frame(frame)
    call = find_implicit_collective(frame, user) or public_call(frame)[0] or PUBLIC_NAMES.get(name, name)
    place = "" if user is None else f" at line {user.f_lineno}{inner_function(frame, user)}"
    return f"{call}{place}{_of_unit(frame)}"


def _of_unit(frame: FrameType | None) -> str:
    unit = fsdp_unit(frame)
    return f" in `{unit}`" if unit else ""


def cell_line() -> str:
    """Return the line of the running cell, such as `` at line 3``; empty outside."""
    user = user_frame(sys._getframe(1)) or user_frame(main_frame())  # a backward pass on a GPU has a thread of its own
    return "" if user is None else f" at line {user.f_lineno}"


def group_operations() -> list[str]:
    """Return the names of the operations of torch's `ProcessGroup`."""
    return [name for name in dir(dist.ProcessGroup) if _OPERATION.match(name)]
