"""By what names users know communication: torch's public functions, and those that communicate in disguise.

A communication call as the user knows it: ``all_reduce at line 2``, ``full_tensor at line 4``.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch.distributed as dist

from axon_nb.engine.user_frame import user_frame
from axon_nb.records.waits import COLLECTIVE_FUNCTIONS

__all__ = ["PUBLIC_CALLS", "PUBLIC_NAMES", "describe_call", "find_implicit_collective", "is_public_call", "public_call"]

_CALL_FILES = tuple(
    os.path.join(*place)
    for place in (
        ("torch", "distributed", "distributed_c10d.py"),
        ("axon_nb", "comm", "collectives", "direct.py"),
        ("axon_nb", "comm", "collectives", "fast_path.py"),
    )
)
PUBLIC_CALLS = frozenset(name for name in dist.distributed_c10d.__all__ if name.islower())
"""The functions of torch.distributed by which users know what a rank waits in."""
_HOROVOD = os.path.join("axon_nb", "compat", "horovod", "")
_HOROVOD_CALLS = frozenset(
    [*(f"{name}{form}" for name in ("allreduce", "broadcast", "grouped_allreduce") for form in ("_", "_async_"))]
    + [f"{name}{form}" for name in ("allgather", "allreduce", "alltoall", "broadcast") for form in ("", "_async")]
    + [f"grouped_{name}{form}" for name in ("allgather", "allreduce", "reducescatter") for form in ("", "_async")]
    + ["add_process_set", "allgather_object", "barrier", "broadcast_object", "broadcast_optimizer_state"]
    + ["broadcast_parameters", "init", "join", "poll", "reducescatter", "reducescatter_async", "remove_process_set"]
    + ["step", "synchronize"]
)
"""Those of `axon_nb.compat.horovod`, and the methods of its optimizer."""

PUBLIC_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
}
"""What users call an operation of a process group."""

_LIBRARIES = tuple(
    f"{os.sep}{package}{os.sep}{folder}{os.sep}"
    for package, folder in (("torch", "distributed"), ("torch", "nn"), ("axon_nb", "parallel"))
)
_FORWARD = "the forward pass of an FSDP model"
_RENAMED = {"_pre_forward": _FORWARD, "_root_pre_forward": _FORWARD, "clip_grad_norm": "clip_grad_norm_"}


def is_public_call(code: CodeType) -> bool:
    """Whether it is the code of a function by which users know communication."""
    if code.co_name in _HOROVOD_CALLS and _HOROVOD in code.co_filename:
        return True
    return code.co_name in PUBLIC_CALLS and code.co_filename.endswith(_CALL_FILES)


def find_implicit_collective(frame: FrameType | None, stop: FrameType | None = None) -> str:
    """The outermost function of a library between `frame` and the cell's frame `stop` that is a collective in disguise.

    Outermost: a `get_model_state_dict` that calls `full_tensor` is what the user wrote.
    """
    found = ""
    while frame is not None and frame is not stop:
        name = _RENAMED.get(frame.f_code.co_name, frame.f_code.co_name)
        if name in COLLECTIVE_FUNCTIONS and any(part in frame.f_code.co_filename for part in _LIBRARIES):
            found = name
        frame = frame.f_back
    return found


_BEGUN_ONLY = frozenset({"batch_isend_irecv", "irecv", "isend", "poll"})


def public_call(frame: FrameType | None) -> tuple[str, bool]:
    """The outermost function of torch.distributed on the stack, and whether it waits for what it begins."""
    call, waits = "", False
    while frame is not None:
        code = frame.f_code
        if is_public_call(code):
            call = code.co_name
            begun_only = call in _BEGUN_ONLY or call.endswith(("_async", "_async_"))  # the latter are Horovod's
            waits = not begun_only and not frame.f_locals.get("async_op", False)
        frame = frame.f_back
    return call, waits


def describe_call(name: str) -> str:
    """What the calling thread is about to do, for the operation `name` of a group."""
    frame = sys._getframe(1)
    user = user_frame(frame)
    what = find_implicit_collective(frame, user) or public_call(frame)[0] or PUBLIC_NAMES.get(name, name)
    return f"{what} at line {user.f_lineno}" if user is not None else what
