"""Predictions for any number of ranks, from a laptop: memory, pipeline schedules, communication and step times.

Importing this package does not import torch: each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axon_nb.plan.calibrate_call import calibrate
    from axon_nb.plan.calibrate_record import Calibration
    from axon_nb.plan.capture_model import capture
    from axon_nb.plan.communication_call import communication
    from axon_nb.plan.communication_plan import CommunicationPlan
    from axon_nb.plan.communication_recorded import recorded_communication
    from axon_nb.plan.errors import PlanCancelledError, PlanError, SimulatorError
    from axon_nb.plan.links import Link
    from axon_nb.plan.links_presets import PRESETS
    from axon_nb.plan.memory_call import memory
    from axon_nb.plan.memory_record import MemoryParts, MemoryPlan, ModuleMemory, RankMemory
    from axon_nb.plan.models import CapturedModel, TensorSpec
    from axon_nb.plan.rates_presets import GPUS
    from axon_nb.plan.schedule_call import schedule
    from axon_nb.plan.schedule_plan import SchedulePlan, StageTimes
    from axon_nb.plan.search_call import search
    from axon_nb.plan.search_plan import SearchPlan
    from axon_nb.plan.step_time_call import step_time
    from axon_nb.plan.step_time_plan import StepTime
    from axon_nb.plan.step_time_work import Rates

__all__ = [
    "GPUS",
    "PRESETS",
    "Calibration",
    "CapturedModel",
    "CommunicationPlan",
    "Link",
    "MemoryParts",
    "MemoryPlan",
    "ModuleMemory",
    "PlanCancelledError",
    "PlanError",
    "RankMemory",
    "Rates",
    "SchedulePlan",
    "SearchPlan",
    "SimulatorError",
    "StageTimes",
    "StepTime",
    "TensorSpec",
    "calibrate",
    "capture",
    "communication",
    "memory",
    "recorded_communication",
    "schedule",
    "search",
    "step_time",
]

_HOME = {
    "calibrate_call": ("calibrate",),
    "calibrate_record": ("Calibration",),
    "capture_model": ("capture",),
    "communication_call": ("communication",),
    "communication_plan": ("CommunicationPlan",),
    "communication_recorded": ("recorded_communication",),
    "errors": ("PlanCancelledError", "PlanError", "SimulatorError"),
    "links": ("Link",),
    "links_presets": ("PRESETS",),
    "memory_call": ("memory",),
    "memory_record": ("MemoryParts", "MemoryPlan", "ModuleMemory", "RankMemory"),
    "models": ("CapturedModel", "TensorSpec"),
    "rates_presets": ("GPUS",),
    "schedule_call": ("schedule",),
    "schedule_plan": ("SchedulePlan", "StageTimes"),
    "search_call": ("search",),
    "search_plan": ("SearchPlan",),
    "step_time_call": ("step_time",),
    "step_time_plan": ("StepTime",),
    "step_time_work": ("Rates",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List all public names, loaded or not."""
    return sorted(__all__)
