"""Predictions for any world, from a laptop: what a model takes of each rank's memory, and more.

Importing this package loads no torch: each name is fetched from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axon_nb.plan.errors import Cancelled, PlanError, SimulatorError
    from axon_nb.plan.memory_call import memory
    from axon_nb.plan.memory_record import MemoryParts, MemoryPlan, ModuleMemory, RankMemory
    from axon_nb.plan.models import CapturedModel, TensorSpec

__all__ = [
    "Cancelled",
    "CapturedModel",
    "MemoryParts",
    "MemoryPlan",
    "ModuleMemory",
    "PlanError",
    "RankMemory",
    "SimulatorError",
    "TensorSpec",
    "memory",
]

_HOME = {
    "errors": ("Cancelled", "PlanError", "SimulatorError"),
    "memory_call": ("memory",),
    "memory_record": ("MemoryParts", "MemoryPlan", "ModuleMemory", "RankMemory"),
    "models": ("CapturedModel", "TensorSpec"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Fetch a public name from its module on first use, and keep it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, those not fetched yet among them."""
    return sorted(__all__)
