"""Prepare a save: write each rank's own state, and plan who writes which tensors."""

from __future__ import annotations

import operator
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from axon_nb.parallel.checkpoint.errors import CheckpointError, CheckpointSaveError
from axon_nb.parallel.checkpoint.folder import CheckpointFolder
from axon_nb.parallel.checkpoint.model_state import model_state
from axon_nb.parallel.checkpoint.optimizers import Optimizers, OptimizerStates
from axon_nb.parallel.checkpoint.own_state import rank_state, write_plain
from axon_nb.parallel.checkpoint.peers import Peers
from axon_nb.parallel.checkpoint.shards import Shards, plain_model
from axon_nb.parallel.checkpoint.tensors import TensorWriter

__all__ = ["Contents", "prepare"]

_NOT_SAVED = "The checkpoint could not be written"


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint."""

    model: nn.Module
    optimizer: Optimizers
    extra: Any
    stateful: dict[str, Any]


def prepare(peers: Peers, folder: CheckpointFolder, step: int, contents: Contents) -> TensorWriter:
    """Write everything but the tensors, and plan who writes those. Collective.

    Raises:
        CheckpointSaveError: a file could not be written.
        CheckpointError: something cannot be saved, or ranks save different steps or see different folders.
    """
    _check_same_step(peers, step)
    token = peers.run_on_first(
        lambda: folder.start().name, error=CheckpointSaveError, what=f"{folder.path} cannot be written"
    )
    draft = folder.path / token
    try:
        return _prepare(peers, draft, contents)
    except CheckpointError:
        if peers.rank == 0:
            folder.discard(draft)
        raise


def _prepare(peers: Peers, draft: Path, contents: Contents) -> TensorWriter:
    shards = Shards(plain := plain_model(contents.model))
    states = OptimizerStates(contents.optimizer, shards)

    def write_rank_part() -> dict[str, Any]:
        if not draft.is_dir():
            raise CheckpointError(
                f"Rank {peers.rank} on host {socket.gethostname()} cannot see what rank 0 created in {draft.parent}; "
                "use a folder on a disk that all hosts share."
            )
        write_plain(rank_state(contents.stateful, contents.extra), draft / f"rank_{peers.rank:05d}.pt", "extra")
        return states.plain()

    parts = peers.run_on_all(write_rank_part, error=CheckpointSaveError, what=_NOT_SAVED)

    def write_shared_part() -> None:
        merged: dict[str, Any] = {kind: {} for kind in parts[0]}
        for part in parts:
            for kind, values in part.items():
                merged[kind].update(values)
        write_plain(merged, draft / "optimizer.pt", "the optimizer's options")

    if contents.optimizer is not None:
        peers.run_on_first(write_shared_part, error=CheckpointSaveError, what=_NOT_SAVED)
    state = {f"model.{name}": value for name, value in model_state(plain, shards).items()}
    return TensorWriter.prepare({**state, **states.tensors()}, draft, peers)


def _check_same_step(peers: Peers, step: int) -> None:
    def checked_step() -> int:
        number = operator.index(step)
        if number < 0:
            raise CheckpointError(f"step must be 0 or more; got {step}.")
        return number

    steps = peers.run_on_all(checked_step, error=CheckpointError, what=f"step must be an integer; got {step!r}")
    for rank, other in enumerate(steps):
        if other != steps[0]:
            raise CheckpointError(f"All ranks must save the same step; rank 0 saves {steps[0]}, rank {rank} {other}.")
