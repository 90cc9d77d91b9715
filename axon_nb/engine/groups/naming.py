"""A communication call as the user knows it: ``all_reduce at line 2``, ``full_tensor at line 4``."""

from __future__ import annotations

import sys
from types import FrameType

from axon_nb.engine.collective_functions import PUBLIC_NAMES, find_function, is_public_call
from axon_nb.engine.user_frame import user_frame

__all__ = ["call_in_words", "public_call"]

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


def call_in_words(name: str) -> str:
    """What the calling thread is about to do, for the operation `name` of a group."""
    frame = sys._getframe(1)
    user = user_frame(frame)
    what = find_function(frame, user) or public_call(frame)[0] or PUBLIC_NAMES.get(name, name)
    return f"{what} at line {user.f_lineno}" if user is not None else what
