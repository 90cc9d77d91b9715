"""The exercises of notebook 09: experts."""

from __future__ import annotations

from axon_course.exercises.nb09.balance import BALANCE
from axon_course.exercises.nb09.capacity import CAPACITY
from axon_course.exercises.nb09.exchange import EXCHANGE

__all__ = ["EXERCISES"]

EXERCISES = (EXCHANGE, CAPACITY, BALANCE)
