"""Setting model, optimizer and each rank's own state to what a checkpoint has."""

from __future__ import annotations

import socket
from typing import Any

from torch import nn

from axon_nb.parallel.checkpoint.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch
from axon_nb.parallel.checkpoint.folder import Manifest, check
from axon_nb.parallel.checkpoint.model_state import model_state, set_model_state
from axon_nb.parallel.checkpoint.optimizers import Optimizers, OptimizerStates
from axon_nb.parallel.checkpoint.own_state import read_plain, set_own_state
from axon_nb.parallel.checkpoint.peers import Peers
from axon_nb.parallel.checkpoint.shards import Shards, plain_model
from axon_nb.parallel.checkpoint.tensors import mismatches, read_metadata, read_tensors

__all__ = ["restore"]

_MODEL, _OPTIMIZER = "model.", "optimizer.pt"
_SHOWN = 6


def restore(
    peers: Peers,
    found: Manifest,
    *,
    model: nn.Module,
    optimizer: Optimizers,
    stateful: dict[str, Any],
    strict: bool,
) -> Any:
    """Read a checkpoint into all of these; collective.

    Returns:
        The `extra` that was saved.

    Raises:
        BrokenCheckpoint: it is not whole.
        CheckpointMismatch: names or shapes differ.
        CheckpointError: a rank does not see it.
    """
    shards = Shards(plain := plain_model(model))
    states = OptimizerStates(optimizer, shards)
    own = {f"{_MODEL}{name}": value for name, value in model_state(plain, shards).items()}

    def fitting() -> tuple[set[str], set[str], list[str]]:
        _look(peers, found)
        if optimizer is not None and _OPTIMIZER not in found.files:
            raise CheckpointMismatch(f"step {found.step} was saved without an optimizer: load it without one.")
        saved = read_metadata(found.path)
        there = {name for name in saved.state_dict_metadata if name.startswith(_MODEL)}
        return set(own), there, mismatches(own, saved)

    outcomes = peers.on_all(fitting, error=BrokenCheckpoint, what=f"{found.path} cannot be read")
    _compare(outcomes, found, strict=strict)
    metadata = read_metadata(found.path)
    own = {name: value for name, value in own.items() if name in metadata.state_dict_metadata}
    tensors = states.expected(metadata)

    def read() -> Any:
        read_tensors({**own, **tensors}, found.path, metadata)
        set_model_state(plain, shards, {name.removeprefix(_MODEL): value for name, value in own.items()})
        if optimizer is not None:
            states.restore(tensors, read_plain(found.path / _OPTIMIZER))
        same = found.world_size == peers.size
        saved = read_plain(found.path / f"rank_{peers.rank if same else 0:05d}.pt")
        set_own_state(saved, stateful, own=same, step=found.step, rank=peers.rank)
        return saved["extra"]

    return peers.on_all(read, error=BrokenCheckpoint, what=f"{found.path} cannot be read")[peers.rank]


def _look(peers: Peers, found: Manifest) -> None:
    if not found.path.is_dir():
        raise CheckpointError(
            f"the host {socket.gethostname()} of rank {peers.rank} does not see {found.path}, which rank 0 has: all "
            "ranks need the same folder, on a disk that all hosts see."
        )
    check(found)


def _compare(outcomes: list[tuple[set[str], set[str], list[str]]], found: Manifest, *, strict: bool) -> None:
    told = sorted({text for _, _, texts in outcomes for text in texts})
    everyone = set().union(*(names for names, _, _ in outcomes))
    told += [f"{name.removeprefix(_MODEL)} is not in the model" for name in sorted(outcomes[0][1] - everyone)]
    if not strict:
        told = [text for text in told if "has shape" in text]
    if told:
        more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise CheckpointMismatch(f"step {found.step} does not fit the model: {'; '.join(told[:_SHOWN])}{more}.")
