"""Before the tensors of a checkpoint are written: who writes what, and each rank's own state."""

from __future__ import annotations

import operator
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from axon_nb.parallel.checkpoint.errors import CheckpointError, SaveFailed
from axon_nb.parallel.checkpoint.folder import CheckpointFolder
from axon_nb.parallel.checkpoint.model_state import model_state
from axon_nb.parallel.checkpoint.optimizers import Optimizers, OptimizerStates
from axon_nb.parallel.checkpoint.own_state import own_state, write_plain
from axon_nb.parallel.checkpoint.peers import Peers
from axon_nb.parallel.checkpoint.shards import Shards, plain_model
from axon_nb.parallel.checkpoint.tensors import TensorWriter

__all__ = ["Contents", "prepare"]

_NOT_SAVED = "the checkpoint could not be written"


@dataclass(frozen=True)
class Contents:
    """What goes into a checkpoint."""

    model: nn.Module
    optimizer: Optimizers
    extra: Any
    stateful: dict[str, Any]


def prepare(peers: Peers, folder: CheckpointFolder, step: int, contents: Contents) -> TensorWriter:
    """Write all but the tensors, and agree on who writes those; collective.

    Raises:
        SaveFailed: a file could not be written.
        CheckpointError: something cannot be saved, ranks save different steps, or they see different folders.
    """
    _same_step(peers, step)
    token = peers.on_first(lambda: folder.start().name, error=SaveFailed, what=f"{folder.path} cannot be written")
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

    def own_part() -> dict[str, Any]:
        if not draft.is_dir():
            raise CheckpointError(
                f"the host {socket.gethostname()} of rank {peers.rank} does not see in {draft.parent} what rank 0 has "
                "made there: all ranks need the same folder, on a disk that all hosts see."
            )
        write_plain(own_state(contents.stateful, contents.extra), draft / f"rank_{peers.rank:05d}.pt", "extra")
        return states.plain()

    parts = peers.on_all(own_part, error=SaveFailed, what=_NOT_SAVED)

    def shared_part() -> None:
        merged: dict[str, Any] = {kind: {} for kind in parts[0]}
        for part in parts:
            for kind, values in part.items():
                merged[kind].update(values)
        write_plain(merged, draft / "optimizer.pt", "the optimizer's options")

    if contents.optimizer is not None:
        peers.on_first(shared_part, error=SaveFailed, what=_NOT_SAVED)
    state = {f"model.{name}": value for name, value in model_state(plain, shards).items()}
    return TensorWriter.prepare({**state, **states.tensors()}, draft, peers)


def _same_step(peers: Peers, step: int) -> None:
    def checked() -> int:
        number = operator.index(step)
        if number < 0:
            raise CheckpointError(f"step={step}: a number from 0.")
        return number

    steps = peers.on_all(checked, error=CheckpointError, what=f"step={step!r} is no whole number")
    for rank, theirs in enumerate(steps):
        if theirs != steps[0]:
            raise CheckpointError(f"rank {rank} saves step {theirs} and rank 0 step {steps[0]}: all save the same.")
