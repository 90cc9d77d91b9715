"""Restore model, optimizer and each rank's own state from a checkpoint."""

from __future__ import annotations

import socket
from typing import Any

from torch import nn

from axon_nb.parallel.checkpoint.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from axon_nb.parallel.checkpoint.folder import Manifest, check
from axon_nb.parallel.checkpoint.metadata import read_metadata
from axon_nb.parallel.checkpoint.peers import Peers
from axon_nb.parallel.checkpoint.rank_state import read_plain, set_rank_state
from axon_nb.parallel.checkpoint.states import Optimizers, OptimizerStates, model_state, set_model_state
from axon_nb.parallel.checkpoint.tensors import Shards, mismatches, plain_model, read_tensors

_MODEL, _OPTIMIZER = "model.", "optimizer.pt"
_SHOWN = 6


def restore(
    peers: Peers,
    manifest: Manifest,
    *,
    model: nn.Module,
    optimizer: Optimizers,
    stateful: dict[str, Any],
    strict: bool,
) -> Any:
    """Load a checkpoint into the given objects. Collective.

    Returns:
        The saved `extra`.

    Raises:
        CorruptCheckpointError: the checkpoint is incomplete.
        CheckpointMismatchError: names or shapes differ.
        CheckpointError: a rank cannot see the checkpoint.
    """
    shards = Shards(plain := plain_model(model))
    states = OptimizerStates(optimizer, shards)
    model_tensors = {f"{_MODEL}{name}": value for name, value in model_state(plain, shards).items()}

    def check_fit() -> tuple[set[str], set[str], list[str]]:
        _check_visible(peers, manifest)
        if optimizer is not None and _OPTIMIZER not in manifest.files:
            raise CheckpointMismatchError(f"Step {manifest.step} was saved without an optimizer; load it without one.")
        saved = read_metadata(manifest.path)
        in_checkpoint = {name for name in saved.state_dict_metadata if name.startswith(_MODEL)}
        return set(model_tensors), in_checkpoint, mismatches(model_tensors, saved)

    outcomes = peers.run_on_all(check_fit, error=CorruptCheckpointError, what=f"{manifest.path} cannot be read")
    _compare(outcomes, manifest, strict=strict)
    metadata = read_metadata(manifest.path)
    model_tensors = {name: value for name, value in model_tensors.items() if name in metadata.state_dict_metadata}
    tensors = states.expected(metadata)

    def read() -> Any:
        read_tensors({**model_tensors, **tensors}, manifest.path, metadata)
        set_model_state(plain, shards, {name.removeprefix(_MODEL): value for name, value in model_tensors.items()})
        if optimizer is not None:
            states.restore(tensors, read_plain(manifest.path / _OPTIMIZER))
        same = manifest.world_size == peers.size
        saved = read_plain(manifest.path / f"rank_{peers.rank if same else 0:05d}.pt")
        set_rank_state(saved, stateful, is_own=same, step=manifest.step, rank=peers.rank)
        return saved["extra"]

    return peers.run_on_all(read, error=CorruptCheckpointError, what=f"{manifest.path} cannot be read")[peers.rank]


def _check_visible(peers: Peers, manifest: Manifest) -> None:
    if not manifest.path.is_dir():
        raise CheckpointError(
            f"Rank {peers.rank} on host {socket.gethostname()} cannot see {manifest.path}, which rank 0 can; use a "
            "folder on a disk that all hosts share."
        )
    check(manifest)


def _compare(outcomes: list[tuple[set[str], set[str], list[str]]], manifest: Manifest, *, strict: bool) -> None:
    problems = sorted({text for _, _, texts in outcomes for text in texts})
    everyone = set().union(*(names for names, _, _ in outcomes))
    problems += [f"{name.removeprefix(_MODEL)} is not in the model" for name in sorted(outcomes[0][1] - everyone)]
    if not strict:
        problems = [text for text in problems if "has shape" in text]
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointMismatchError(
            f"Step {manifest.step} does not fit the model: {'; '.join(problems[:_SHOWN])}{more}."
        )
