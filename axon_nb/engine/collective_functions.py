"""By what names users know communication: torch's public functions, and those that communicate in disguise."""

from __future__ import annotations

import os
from types import CodeType, FrameType

import torch.distributed as dist

from axon_nb.records.advice import COLLECTIVE_FUNCTIONS

__all__ = ["PUBLIC_CALLS", "PUBLIC_NAMES", "find_function", "is_public_call"]

_CALL_FILES = tuple(
    os.path.join(*place)
    for place in (
        ("torch", "distributed", "distributed_c10d.py"),
        ("axon_nb", "comm", "direct.py"),
        ("axon_nb", "comm", "lane.py"),
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


def find_function(frame: FrameType | None, stop: FrameType | None = None) -> str:
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
