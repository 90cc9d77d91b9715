"""Crash-safe checkpoints that load on any number of ranks, and export to safetensors."""

from __future__ import annotations

from axon_nb.parallel.checkpoint.checkpoints import Checkpoints, ResumableSampler, Resumed
from axon_nb.parallel.checkpoint.folder import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointWarning,
    CorruptCheckpointError,
)
from axon_nb.parallel.checkpoint.saving import PendingSave, export_safetensors

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "CheckpointWarning",
    "Checkpoints",
    "CorruptCheckpointError",
    "PendingSave",
    "ResumableSampler",
    "Resumed",
    "export_safetensors",
]
