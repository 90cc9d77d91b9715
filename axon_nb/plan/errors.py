"""Errors of planning.

UsageError
 └── PlanError               the request cannot be planned; the message says what can
      └── CaptureError       this model cannot be planned in any way
AxonError
 ├── SimulatorError          the simulator process died or failed
 └── PlanCancelledError      the plan was cancelled through its `cancel` event

KeyboardInterrupt passes through.
"""

from __future__ import annotations

from axon_nb.errors import AxonError, UsageError


class PlanError(UsageError):
    """The request cannot be planned; the message gives the value, the rule and the fix."""


class CaptureError(PlanError):
    """This model cannot be captured; the message says why."""


class SimulatorError(AxonError, RuntimeError):
    """The simulator process ended without an answer; the notebook is unaffected."""


class PlanCancelledError(AxonError, RuntimeError):
    """The plan was cancelled before it finished."""
