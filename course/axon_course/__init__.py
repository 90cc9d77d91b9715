"""The course on distributed training: exercises that check themselves, one module for each notebook of `course/`."""

from __future__ import annotations

from axon_course.commands import check, hint, measured, predict, progress, solution

__version__ = "0.1.0"

__all__ = ["check", "hint", "measured", "predict", "progress", "solution"]
