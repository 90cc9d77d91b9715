"""Finds optimizer steps on a stack.

Private hook into torch: the wrapper that every optimizer's `step` runs in. Without it no step is found, so an interrupt
may leave one half done.
"""

from __future__ import annotations

import functools
from types import CodeType, FrameType

from axon_nb.compat.deepspeed import STEP_CODE


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
