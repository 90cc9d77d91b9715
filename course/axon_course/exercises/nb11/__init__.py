"""The exercises of notebook 11: the bug hunt."""

from __future__ import annotations

from axon_course.exercises.nb11.snapshots import SNAPSHOTS
from axon_course.exercises.nb11.steps import SAFE_STEP
from axon_course.exercises.nb11.waits import BLAME
from axon_course.exercises.nb11.weights import WHO_DIFFERS

__all__ = ["EXERCISES"]

EXERCISES = (BLAME, SAFE_STEP, SNAPSHOTS, WHO_DIFFERS)
