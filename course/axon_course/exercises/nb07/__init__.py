"""The exercises of notebook 07: ring attention."""

from __future__ import annotations

from axon_course.exercises.nb07.parts import MERGE
from axon_course.exercises.nb07.ring import RING
from axon_course.exercises.nb07.split import SPLIT

__all__ = ["EXERCISES"]

EXERCISES = (MERGE, RING, SPLIT)
