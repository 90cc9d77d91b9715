"""What is changed in DeepSpeed when a cell imports it.

Private hooks; `missing_setup_hooks()` names those that it does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

__all__ = ["missing_setup_hooks", "skip_shm_all_reduce", "wrap_step"]


def missing_setup_hooks(backend: ModuleType, engine: ModuleType) -> list[str]:
    """Names of the hooks that this DeepSpeed does not have.

    Args:
        backend: The module ``deepspeed.comm.torch``.
        engine: The module ``deepspeed.runtime.engine``.
    """
    absent = [] if hasattr(backend, "build_shm_op") else ["build_shm_op"]
    kind = getattr(engine, "DeepSpeedEngine", None)
    there = vars(kind) if kind is not None else {}
    return absent + [f"DeepSpeedEngine.{name}" for name in ("__init__", "step") if name not in there]


def skip_shm_all_reduce(backend: ModuleType) -> None:
    """Prevent DeepSpeed from building its shared-memory all-reduce, as it does on CPUs at start.

    Only inference uses it. Building it takes a compiler and half a minute, and a rank that waits in it hangs forever
    if another rank fails. Without the hook it is built.

    Args:
        backend: The module ``deepspeed.comm.torch``, just imported.
    """
    if hasattr(backend, "build_shm_op"):
        vars(backend).update(build_shm_op=lambda: None)


def wrap_step(engine: ModuleType, on_step_end: Callable[[], None]) -> CodeType:
    """Call `on_step_end` right after each step of an engine.

    DeepSpeed's optimizers distribute new weights after torch's optimizer has stepped: an interrupt in between
    would leave ranks with different weights.

    Args:
        engine: The module ``deepspeed.runtime.engine``, just imported.
        on_step_end: Called on the stack of the step.

    Returns:
        The code object under which the whole step runs.
    """
    kind = engine.DeepSpeedEngine
    original = kind.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        on_step_end()
        return result

    kind.step = step
    code: CodeType = vars(kind)["step"].__code__
    return code
