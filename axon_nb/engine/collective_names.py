"""Names of communication calls as users know them: ``all_reduce at line 2``, ``full_tensor at line 4``.

Covers torch's public functions, and library functions that communicate implicitly.
"""

from __future__ import annotations

import os
import re
import sys
from types import CodeType, FrameType

import torch.distributed as dist

from axon_nb.engine.frames import main_frame
from axon_nb.records.waits.functions import COLLECTIVE_FUNCTIONS, PUBLIC_NAMES
from axon_nb.shell.user_frame import inner_function, user_frame

_CALL_FILES = tuple(
    os.path.join(*place)
    for place in (
        ("torch", "distributed", "distributed_c10d.py"),
        ("axon_nb", "comm", "collectives", "direct.py"),
        ("axon_nb", "comm", "collectives", "fast_path.py"),
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
    return f"{call} at line {user.f_lineno}{inner_function(frame, user)}" if call else ""


def describe_call(name: str) -> str:
    """Describe the call that the current thread is making, for the group operation `name`."""
    frame = sys._getframe(1)
    user = user_frame(frame)
    call = find_implicit_collective(frame, user) or public_call(frame)[0] or PUBLIC_NAMES.get(name, name)
    return f"{call} at line {user.f_lineno}{inner_function(frame, user)}" if user is not None else call


def group_operations() -> list[str]:
    """Return the names of the operations of torch's `ProcessGroup`."""
    return [name for name in dir(dist.ProcessGroup) if _OPERATION.match(name)]
