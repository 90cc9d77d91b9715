"""What is changed in DeepSpeed when a cell imports it.

Private hooks; `missing_setup_hooks()` names those that it does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

__all__ = ["missing_setup_hooks", "use_torch_groups_alone", "wrap_step"]


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


def use_torch_groups_alone(backend: ModuleType) -> None:
    """DeepSpeed does not build its own all-reduce through shared memory, which CPUs get when it starts.

    Inference alone uses it; building it takes a compiler and half a minute, and whoever waits in it waits for ever
    when a rank fails. Without the hook it is built.

    Args:
        backend: The module ``deepspeed.comm.torch``, just imported.
    """
    if hasattr(backend, "build_shm_op"):
        vars(backend).update(build_shm_op=lambda: None)


def wrap_step(engine: ModuleType, ended: Callable[[], None]) -> CodeType:
    """Have `ended` be called right after each step of an engine.

    The optimizers of DeepSpeed hand new weights round after torch's optimizer has stepped: an interrupt in between
    would leave ranks with different ones.

    Args:
        engine: The module ``deepspeed.runtime.engine``, just imported.
        ended: Called on the stack of the step.

    Returns:
        The code under which all of a step runs.
    """
    kind = engine.DeepSpeedEngine
    original = kind.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        ended()
        return result

    kind.step = step
    code: CodeType = vars(kind)["step"].__code__
    return code
