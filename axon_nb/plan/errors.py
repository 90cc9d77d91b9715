"""What can go wrong in planning, as types.

UsageError
 └── PlanError        what was asked for cannot be planned; the message says what can
AxonError
 └── SimulatorError   the simulator's process ended before its answer, or failed within
KeyboardInterrupt is passed on; `Cancelled` is raised where a plan was called off by its `cancel`.
"""

from __future__ import annotations

from axon_nb.errors import AxonError, UsageError

__all__ = ["Cancelled", "PlanError", "SimulatorError"]


class PlanError(UsageError):
    """What was asked for cannot be planned; the message gives the value, the rule and the fix."""


class SimulatorError(AxonError, RuntimeError):
    """The simulator ended without an answer; the notebook is not touched by that."""


class Cancelled(AxonError, RuntimeError):
    """The plan was called off before it was ready."""
