"""Accelerate on ranks that compute on CPUs, where it trains unsynchronised, without a word, unless it is told.

Its `PartialState` takes a process without a GPU for the only one of its training, whatever torchrun's variables say,
unless it gets ``cpu=True``. ``ACCELERATE_USE_CPU`` has `Accelerator` pass that on, but a `PartialState()` that is made
first, directly or by a logger, does not read it, and every `Accelerator` made later shares its state.

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
    """Have every `PartialState` of this process be one of all ranks.

    Args:
        state: The module ``accelerate.state``, just imported.
        world_size: Number of ranks.
    """
    if absent := missing_state_hooks(state):
        warnings.warn(
            f"axon_nb was tested with accelerate {_TESTED}, and this one has no {absent[0]}: look at "
            "`accelerator.num_processes` before you train.",
            stacklevel=2,
        )
        return
    kind = state.PartialState
    original = kind.__init__
    told: list[str] = []

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        original(self, True, **kwargs)
        for variable, name in _PLUGINS.items():
            if os.environ.get(variable, "").lower() == "true" and name not in told:
                told.append(name)
                print(
                    f"axon_nb: Accelerate has no {name} on CPUs, and trains this model as DistributedDataParallel: "
                    "the same weights, whole on every rank."
                )

    kind.__init__ = __init__
    if kind._shared_state and kind().num_processes != world_size:  # made before this process was a rank
        state.AcceleratorState._reset_state(reset_partial_state=True)
