"""Pipeline parallelism on torch's schedules: stages on ranks, microbatches, and a span for every action."""

from __future__ import annotations

from axon_nb.parallel.pipeline.pipeline import Pipeline
from axon_nb.parallel.pipeline.schedule import PipelineMemoryStats, PipelineSchedule, ideal_timeline
from axon_nb.parallel.pipeline.stages import PipelineStage, Section
from axon_nb.records.training.steps import bubble_fraction

__all__ = [
    "Pipeline",
    "PipelineMemoryStats",
    "PipelineSchedule",
    "PipelineStage",
    "Section",
    "bubble_fraction",
    "ideal_timeline",
]
