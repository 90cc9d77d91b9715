"""What every rank keeps for itself in a checkpoint: random numbers, samplers and schedulers, the user's own values."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from axon_nb.parallel.checkpoint.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch
from axon_nb.parallel.checkpoint.folder import sync_file
from axon_nb.parallel.checkpoint.rng import derive_rng, rng_state, set_rng_state

__all__ = ["own_state", "read_plain", "set_own_state", "write_plain"]


def own_state(stateful: Mapping[str, Any], extra: Any) -> bytes:
    """This rank's state, as a file's content.

    Raises:
        CheckpointError: an object has no state; a value is neither a tensor nor a plain container or number.
    """
    states = {name: _state_of(name, item) for name, item in stateful.items()}
    return _packed({"rng": rng_state(), "stateful": states, "extra": extra}, "extra or an object's state")


def set_own_state(saved: dict[str, Any], stateful: Mapping[str, Any], *, own: bool, step: int, rank: int) -> None:
    """Set what `own_state` has found.

    Args:
        saved: The content.
        stateful: Objects of the names that were saved.
        own: It is this rank's own; otherwise it stands in, and random numbers are derived from step and rank.
        step: Of the checkpoint.
        rank: This process's.

    Raises:
        CheckpointMismatch: an object was not saved.
    """
    missing = [name for name in stateful if name not in saved["stateful"]]
    if missing:
        there = ", ".join(saved["stateful"]) or "none"
        raise CheckpointMismatch(f"{', '.join(missing)}: not in the checkpoint, which has {there}.")
    for name, item in stateful.items():
        state = saved["stateful"][name]
        if callable(getattr(item, "load_state_dict", None)):
            item.load_state_dict(state)
        else:
            item.set_epoch(state["epoch"])
    if own:
        set_rng_state(saved["rng"])
    else:
        derive_rng(step=step, rank=rank)


def _state_of(name: str, item: Any) -> Any:
    if callable(getattr(item, "state_dict", None)):
        return item.state_dict()
    if callable(getattr(item, "set_epoch", None)) and hasattr(item, "epoch"):
        return {"epoch": item.epoch}
    raise CheckpointError(
        f"{name}={type(item).__name__}: it has neither state_dict() nor set_epoch(); plain values go into extra=…"
    )


def _packed(content: Any, what: str) -> bytes:
    """As `torch.save`, and proved to be readable without running code of its own."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{what} cannot be saved: tensors, numbers, strings and containers of them can ({str(error)[:200]})."
        ) from None
    return buffer.getvalue()


def write_plain(content: Any, path: Path, what: str) -> None:
    """Write plain values, or the bytes of `own_state`, and wait until they are on the disk."""
    path.write_bytes(content if isinstance(content, bytes) else _packed(content, what))
    sync_file(path)


def read_plain(path: Path) -> Any:
    """Read what `write_plain` has written.

    Raises:
        BrokenCheckpoint: it cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
