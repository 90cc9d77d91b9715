"""Checkpoints that survive a kill at any moment and load on any number of ranks, and export to safetensors."""

from __future__ import annotations

from axon_nb.parallel.checkpoint.checkpoints import Checkpoints, Resumed
from axon_nb.parallel.checkpoint.errors import (
    BrokenCheckpoint,
    CheckpointError,
    CheckpointMismatch,
    CheckpointWarning,
    NoCheckpoint,
    SaveFailed,
)
from axon_nb.parallel.checkpoint.safetensors import export_safetensors
from axon_nb.parallel.checkpoint.sampler import ResumableSampler
from axon_nb.parallel.checkpoint.saving import PendingSave

__all__ = [
    "BrokenCheckpoint",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointWarning",
    "Checkpoints",
    "NoCheckpoint",
    "PendingSave",
    "ResumableSampler",
    "Resumed",
    "SaveFailed",
    "export_safetensors",
]
