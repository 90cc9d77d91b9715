"""Exceptions of `axon_nb.comm`.

CommError                       base of all communication errors
 ├── InvalidArgumentError       an argument is invalid; also a `UsageError`
 │    ├── InvalidRankError      the group has no such rank
 │    └── TensorError           the operation does not support the tensor's shape, dtype, device or layout
 │         └── TensorMismatchError  ranks passed tensors that do not fit together
 ├── NotInGroupError            this rank is not a member of the group
 ├── WorldClosedError           the world was closed or never initialized
 ├── CollectiveMismatchError    ranks called different collectives on the same group
 ├── DeadlockError              every rank of a mock world waits for another
 └── NcclError                  NCCL is unavailable or reported an error
"""

from __future__ import annotations

from axon_nb.errors import AxonError, UsageError


class CommError(AxonError, RuntimeError):
    """Base of all communication errors; the message gives the value, the rule and the fix."""


class InvalidArgumentError(CommError, UsageError):
    """An argument of a communication call is invalid."""


class InvalidRankError(InvalidArgumentError):
    """The group has no such rank."""


class NotInGroupError(CommError):
    """This rank is not a member of the group."""


class TensorError(InvalidArgumentError):
    """The operation does not support this tensor."""


class TensorMismatchError(TensorError):
    """Ranks passed tensors that do not fit together."""


class WorldClosedError(CommError):
    """The world was closed or never initialized."""


class CollectiveMismatchError(CommError):
    """Ranks called different collectives on the same group."""


class DeadlockError(CommError):
    """No rank of a mock world can continue: each waits for another."""


class NcclError(CommError):
    """NCCL is unavailable or reported an error."""
