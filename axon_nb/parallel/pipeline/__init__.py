"""Pipeline parallelism on torch's schedules: stages on ranks, microbatches, and a span for every action."""

from __future__ import annotations

from axon_nb.parallel.pipeline.memory import PipelineMemoryStats
from axon_nb.parallel.pipeline.pipeline import Pipeline
from axon_nb.parallel.pipeline.schedule import PipelineSchedule
from axon_nb.parallel.pipeline.split import Section
from axon_nb.parallel.pipeline.stage import PipelineStage
from axon_nb.parallel.pipeline.timeline import bubble_fraction, ideal_timeline

__all__ = [
    "Pipeline",
    "PipelineMemoryStats",
    "PipelineSchedule",
    "PipelineStage",
    "Section",
    "bubble_fraction",
    "ideal_timeline",
]
