"""What can go wrong with checkpoints, as types.

CheckpointError               base; a UsageError, as it is told on all ranks alike
 ├── NoCheckpoint             there is none of that step, or none at all
 ├── BrokenCheckpoint         a folder that is not whole: files are missing or cut short
 ├── CheckpointMismatch       it does not fit the model or the optimizer: names or shapes
 └── SaveFailed               it could not be written; the last good one is still there
"""

from __future__ import annotations

from axon_nb.errors import UsageError

__all__ = [
    "BrokenCheckpoint",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointWarning",
    "NoCheckpoint",
    "SaveFailed",
]


class CheckpointError(UsageError):
    """A checkpoint that cannot be written or read."""


class NoCheckpoint(CheckpointError):
    """There is no such checkpoint."""


class BrokenCheckpoint(CheckpointError):
    """A checkpoint that is not whole."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model or optimizer."""


class SaveFailed(CheckpointError):
    """A checkpoint that was not written."""


class CheckpointWarning(UserWarning):
    """Resumed, but not as an uninterrupted run would have gone on."""
