"""Per-rank state of a checkpoint: random number generators, samplers, schedulers, and the user's own values."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from axon_nb.parallel.checkpoint.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from axon_nb.parallel.checkpoint.folder import sync_file
from axon_nb.random_states import random_states, set_random_states


def derive_rng(*, step: int, rank: int) -> None:
    """Seed a rank that has no saved state; deterministic for a given step and rank."""
    seed = (step * 1_000_003 + rank * 7_919) % (1 << 32)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rank_state(stateful: Mapping[str, Any], extra: Any) -> bytes:
    """Serialize this rank's state.

    Raises:
        CheckpointError: an object has no state, or a value is not a tensor, number, string or container of them.
    """
    states = {name: _state_of(name, item) for name, item in stateful.items()}
    return _serialize({"rng": random_states(), "stateful": states, "extra": extra}, "extra or an object's state")


def set_rank_state(saved: dict[str, Any], stateful: Mapping[str, Any], *, is_own: bool, step: int, rank: int) -> None:
    """Restore a state returned by `rank_state`.

    Args:
        saved: The deserialized state.
        stateful: Objects under the names with which they were saved.
        is_own: Whether the state is this rank's own. Otherwise it is rank 0's, and random states are derived from step
            and rank.
        step: Step of the checkpoint.
        rank: Rank of this process.

    Raises:
        CheckpointMismatchError: an object is not in the checkpoint.
    """
    absent = [name for name in stateful if name not in saved["stateful"]]
    if absent:
        there = ", ".join(saved["stateful"]) or "none"
        raise CheckpointMismatchError(f"Not in the checkpoint: {', '.join(absent)}; it has {there}.")
    for name, item in stateful.items():
        state = saved["stateful"][name]
        if callable(getattr(item, "load_state_dict", None)):
            item.load_state_dict(state)
        else:
            item.set_epoch(state["epoch"])
    if is_own:
        set_random_states(saved["rng"])
    else:
        derive_rng(step=step, rank=rank)


def _state_of(name: str, item: Any) -> Any:
    if callable(getattr(item, "state_dict", None)):
        return item.state_dict()
    if callable(getattr(item, "set_epoch", None)) and hasattr(item, "epoch"):
        return {"epoch": item.epoch}
    raise CheckpointError(
        f"{name} must have state_dict() or set_epoch(); got {type(item).__name__}. Pass plain values in extra=…"
    )


def _serialize(content: Any, what: str) -> bytes:
    """Serialize like `torch.save`, and verify that it can be read without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"Cannot save {what}: only tensors, numbers, strings and containers of them ({str(error)[:200]})."
        ) from None
    return buffer.getvalue()


def write_plain(content: Any, path: Path, what: str) -> None:
    """Write plain values, or the bytes of `rank_state`, and flush them to disk."""
    path.write_bytes(content if isinstance(content, bytes) else _serialize(content, what))
    sync_file(path)


def read_plain(path: Path) -> Any:
    """Read a file written by `write_plain`.

    Raises:
        CorruptCheckpointError: the file cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptCheckpointError(f"Cannot read {path}: {type(error).__name__}: {str(error)[:200]}") from error
