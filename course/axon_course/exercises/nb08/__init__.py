"""The exercises of notebook 08: pipelines and their bubble."""

from __future__ import annotations

from axon_course.exercises.nb08.cuts import RESPLIT
from axon_course.exercises.nb08.order import ORDER
from axon_course.exercises.nb08.schedules import CHOICE

__all__ = ["EXERCISES"]

EXERCISES = (ORDER, CHOICE, RESPLIT)
