"""The exercises of notebook 12: train, break, resume, ship."""

from __future__ import annotations

from axon_course.exercises.nb12.clipping import CLIP
from axon_course.exercises.nb12.mesh import MEMBERS
from axon_course.exercises.nb12.recipe import RECIPE
from axon_course.exercises.nb12.resume import RESUME

__all__ = ["EXERCISES"]

EXERCISES = (MEMBERS, CLIP, RESUME, RECIPE)
