"""Faults for practice: planted in a cell by the learner's seed, and found out by what the ranks show.

Their kinds are those of `tests/fuzz`, which makes sure that ranks survive them.
"""

from __future__ import annotations

from axon_course.faults.kinds import Fault, planted
from axon_course.faults.verdicts import answer, clue

__all__ = ["Fault", "answer", "clue", "planted"]
