"""Exceptions of checkpoints.

CheckpointError                   base; raised on all ranks alike
 ├── CheckpointNotFoundError      there is no checkpoint of that step, or none at all
 ├── CorruptCheckpointError       a checkpoint is incomplete: files are missing or truncated
 ├── CheckpointMismatchError      it does not fit the model or the optimizer: names or shapes differ
 └── CheckpointSaveError          it could not be written; the last good one remains
"""

from __future__ import annotations

from axon_nb.errors import AxonError


class CheckpointError(AxonError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError):
    """There is no such checkpoint."""


class CorruptCheckpointError(CheckpointError):
    """The checkpoint is incomplete."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is of another model or optimizer."""


class CheckpointSaveError(CheckpointError):
    """The checkpoint could not be written."""


class CheckpointWarning(UserWarning):
    """The run was resumed, but differs from an uninterrupted one."""
