"""Keeps Accelerate synchronised on CPU ranks, where by default it silently trains every rank independently.

Its `PartialState` assumes that a process without a GPU is the only one, whatever torchrun's variables say, unless it
gets ``cpu=True``. ``ACCELERATE_USE_CPU`` makes `Accelerator` pass that on. But a `PartialState()` created earlier,
directly or by a logger, does not read it, and every later `Accelerator` shares its state.

A private hook into Accelerate: where `missing_state_hooks()` names something, the variable alone is left, and a warning
says so.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from types import ModuleType
from typing import Any

__all__ = ["missing_state_hooks", "synchronise_on_cpus"]

_TESTED = "1.15"
_PLUGINS = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP"}


def missing_state_hooks(state: ModuleType) -> list[str]:
    """Names of the hooks that this Accelerate does not have.

    Args:
        state: The module ``accelerate.state``.
    """
    kind: Any = getattr(state, "PartialState", None)
    absent = [
        f"PartialState.{name}"
        for name in ("__init__", "_reset_state", "_shared_state", "initialized")
        if not hasattr(kind, name)
    ]
    if not absent and "cpu" not in inspect.signature(kind.__init__).parameters:
        absent.append("PartialState(cpu=)")
    return absent


def synchronise_on_cpus(state: ModuleType, *, world_size: int) -> None:
    """Make every `PartialState` of this process belong to all ranks.

    Args:
        state: The module ``accelerate.state``, just imported.
        world_size: Number of ranks.
    """
    if absent := missing_state_hooks(state):
        warnings.warn(
            f"axon_nb was tested with accelerate {_TESTED}; this version lacks {absent[0]}. Check "
            "`accelerator.num_processes` before you train.",
            stacklevel=2,
        )
        return
    kind = state.PartialState
    original = kind.__init__
    reported: list[str] = []

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        original(self, True, **kwargs)
        for variable, name in _PLUGINS.items():
            if os.environ.get(variable, "").lower() == "true" and name not in reported:
                reported.append(name)
                print(
                    f"axon_nb: Accelerate does not support {name} on CPUs; it trains this model with "
                    "DistributedDataParallel, with full weights on every rank."
                )

    kind.__init__ = __init__
    if kind._shared_state and kind().num_processes != world_size:  # created before this process was a rank
        state.AcceleratorState._reset_state(reset_partial_state=True)
