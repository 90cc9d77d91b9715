"""The exercises of notebook 06: one matrix on many ranks."""

from __future__ import annotations

from axon_course.exercises.nb06.heads import HEADS
from axon_course.exercises.nb06.layers import LAYERS
from axon_course.exercises.nb06.losses import LOSS
from axon_course.exercises.nb06.sequence import SEQUENCE

__all__ = ["EXERCISES"]

EXERCISES = (LAYERS, HEADS, SEQUENCE, LOSS)
