"""Predictions for any number of ranks, from a laptop: memory, pipeline schedules, communication and step times.

Importing this package does not import torch: each name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axon_nb.lazy import lazy_names

if TYPE_CHECKING:
    from axon_nb.plan.calibration.calibrate import calibrate
    from axon_nb.plan.calibration.result import Calibration
    from axon_nb.plan.errors import PlanCancelledError, PlanError, SimulatorError
    from axon_nb.plan.footprint.memory import memory
    from axon_nb.plan.footprint.plan import MemoryParts, MemoryPlan, ModuleMemory, RankMemory
    from axon_nb.plan.hardware import GPUS, PRESETS, Link, Rates
    from axon_nb.plan.layout_search.plan import SearchPlan
    from axon_nb.plan.layout_search.search import search
    from axon_nb.plan.models import CapturedModel, TensorSpec
    from axon_nb.plan.pipeline import SchedulePlan, StageTimes, schedule
    from axon_nb.plan.program.run import ProgramPlan, run
    from axon_nb.plan.skeleton import capture
    from axon_nb.plan.timing import StepTime, step_time
    from axon_nb.plan.traffic.communication import communication
    from axon_nb.plan.traffic.plan import CommunicationPlan, recorded_communication

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
    "ProgramPlan",
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
    "run",
    "schedule",
    "search",
    "step_time",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "calibration.calibrate": "calibrate",
        "calibration.result": "Calibration",
        "errors": "PlanCancelledError PlanError SimulatorError",
        "footprint.memory": "memory",
        "footprint.plan": "MemoryParts MemoryPlan ModuleMemory RankMemory",
        "hardware": "GPUS PRESETS Link Rates",
        "layout_search.plan": "SearchPlan",
        "layout_search.search": "search",
        "models": "CapturedModel TensorSpec",
        "pipeline": "SchedulePlan StageTimes schedule",
        "program.run": "ProgramPlan run",
        "skeleton": "capture",
        "timing": "StepTime step_time",
        "traffic.communication": "communication",
        "traffic.plan": "CommunicationPlan recorded_communication",
    },
)
