"""Crash-safe checkpoints that load on any number of ranks, and export to safetensors."""

from __future__ import annotations

from axon_nb.parallel.checkpoint.checkpoints import Checkpoints, Resumed
from axon_nb.parallel.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointWarning,
    CorruptCheckpointError,
)
from axon_nb.parallel.checkpoint.safetensors import export_safetensors
from axon_nb.parallel.checkpoint.sampler import ResumableSampler
from axon_nb.parallel.checkpoint.saving import PendingSave

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
