"""The backend "shm" for torch: groups over shared memory, for scripts as for notebooks."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.shared_memory.group import BACKEND, SharedMemoryGroup
from axon_nb.torch_api import torch_api

__all__ = ["caller_line", "register"]

_OURS = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (torch.__file__, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
)
_foreign: dict[CodeType, bool] = {}
_registered: list[str] = []


def caller_line() -> int:
    """The line of the code that called torch or axon_nb; 0: there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        foreign = _foreign.get(code)
        if foreign is None:
            foreign = _foreign[code] = not code.co_filename.startswith(_OURS)
        if foreign:
            return frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return 0


def register(name: str = BACKEND) -> None:
    """Let `dist.init_process_group` and `dist.new_group` make groups over shared memory.

    Args:
        name: Of the backend.
    """
    if name in _registered:
        return
    _registered.append(name)

    def create(options: Any, _: Any) -> SharedMemoryGroup:
        return SharedMemoryGroup(
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout or timedelta(minutes=30),
            name=options.group_id,
            members=list(options.global_ranks_in_group),
            line=caller_line,
        )

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    torch_api().register_group_class(name)
