"""The course on distributed training: exercises that check themselves, for `course/NN_name.py`."""

from __future__ import annotations

from axon_nb.course.commands import check, hint, measured, predict, progress, solution

__all__ = ["check", "hint", "measured", "predict", "progress", "solution"]
