"""Whether an optimizer's step is on a stack. Private hook into torch: the wrapper that every `step` runs in.

Where it is missing no step is ever found: an interrupt may then tear one.
"""

from __future__ import annotations

import functools
from types import CodeType, FrameType

__all__ = ["count_as_step", "missing_step_hooks", "step_depth"]

_other_steps: dict[int, CodeType] = {}
"""By identity: to hash code is to hash all of it, for every frame that is looked at."""


@functools.cache
def _wrapper_code() -> CodeType | None:
    from torch.optim import Optimizer

    hook = getattr(Optimizer, "profile_hook_step", None)
    # All wrappers share one code object.
    return getattr(hook(lambda self: None), "__code__", None) if hook is not None else None


def missing_step_hooks() -> list[str]:
    """Names of the hooks that this torch does not have."""
    return [] if _wrapper_code() is not None else ["Optimizer.profile_hook_step"]


def count_as_step(code: CodeType) -> None:
    """What runs under this code is a step, too: of an optimizer that is none of torch's."""
    _other_steps[id(code)] = code


def step_depth(frame: FrameType | None) -> int:
    """How many steps are on this stack: 2 in an optimizer that steps another, such as ZeroRedundancyOptimizer."""
    depth, step = 0, _wrapper_code()
    while frame is not None:
        depth += frame.f_code is step or id(frame.f_code) in _other_steps
        frame = frame.f_back
    return depth
