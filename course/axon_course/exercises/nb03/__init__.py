"""The exercises of notebook 03: where the memory goes."""

from __future__ import annotations

from axon_course.exercises.nb03.activations import ACTIVATIONS
from axon_course.exercises.nb03.recomputing import RECOMPUTING
from axon_course.exercises.nb03.states import STATES

__all__ = ["EXERCISES"]

EXERCISES = (STATES, ACTIVATIONS, RECOMPUTING)
