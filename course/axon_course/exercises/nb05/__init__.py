"""The exercises of notebook 05: who keeps what."""

from __future__ import annotations

from axon_course.exercises.nb05.optimizer import SHARED_ADAM
from axon_course.exercises.nb05.weights import SAVING, SHARDED_FORWARD

__all__ = ["EXERCISES"]

EXERCISES = (SHARED_ADAM, SHARDED_FORWARD, SAVING)
