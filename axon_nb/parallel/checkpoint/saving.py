"""Saves a checkpoint: plans who writes which tensors, writes in the background, reports progress and outcome."""

from __future__ import annotations

import operator
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from axon_nb.parallel.checkpoint.errors import CheckpointError, CheckpointSaveError
from axon_nb.parallel.checkpoint.folder import CheckpointFolder
from axon_nb.parallel.checkpoint.peers import Peers, describe
from axon_nb.parallel.checkpoint.rank_state import rank_state, write_plain
from axon_nb.parallel.checkpoint.states import Optimizers, OptimizerStates, model_state
from axon_nb.parallel.checkpoint.tensors import Shards, TensorWriter, plain_model

_POLL_S = 0.02
_EXIT_TIMEOUT_S = 20.0
_NOT_SAVED = "The checkpoint could not be written"


class PendingSave:
    """A save in the background, as returned by `Checkpoints.async_save`.

    Every rank writes its part; once all parts exist, rank 0 completes the checkpoint. The threads communicate only
    through files, so they never interfere with collectives of the training.
    """

    step: int
    """Step of the save."""

    def __init__(
        self,
        step: int,
        writer: TensorWriter,
        folder: CheckpointFolder,
        *,
        keep: int | None,
        wait: Callable[[], None],
    ) -> None:
        self.step = step
        self.token = writer.draft.name
        self._writer, self._folder, self._keep = writer, folder, keep
        self._wait = wait
        self._part_written = threading.Event()
        self._stop = threading.Event()
        self._failure: str | None = None
        self._path: Path | None = None
        self._thread = threading.Thread(target=self._run, name=f"axon_nb-save-{step}", daemon=False)

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    @property
    def progress(self) -> float:
        """Fraction of this rank's bytes that are written, 0 to 1."""
        if self._part_written.is_set() and self._failure is None:
            return 1.0
        return min(1.0, self._writer.bytes_written / max(1, self._writer.bytes_total))

    @property
    def done(self) -> bool:
        """Whether this rank has finished; on rank 0, whether the checkpoint is complete or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete, like `Checkpoints.wait`. Collective.

        Raises:
            CheckpointSaveError: it could not be written; raised on all ranks.
        """
        self._wait()

    @property
    def failure(self) -> str | None:
        """Error on this rank; None if there is none so far."""
        return self._failure

    def part_outcome(self) -> str | None:
        """Wait until this rank's part is written; return the error, if any."""
        self._part_written.wait()
        return self._failure

    def outcome(self) -> str | None:
        """Wait until this rank has finished; return the error, if any."""
        self._thread.join()
        return self._failure

    def abort(self) -> None:
        """Abort: another rank will not write its part."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._writer.write()
            self._part_written.set()
            if self._writer.rank == 0:
                self._finish()
        except Exception as error:
            self._failure = describe(error)
            if not threading.main_thread().is_alive():
                print(f"The checkpoint of step {self.step} was not saved: {self._failure}", file=sys.stderr)
        finally:
            self._part_written.set()

    def _finish(self) -> None:
        deadline = None
        while not self._writer.all_written():
            if self._stop.wait(_POLL_S) or not self._writer.draft.exists():
                raise CheckpointSaveError("A rank has not written its part.")
            if deadline is None and not threading.main_thread().is_alive():
                deadline = time.monotonic() + _EXIT_TIMEOUT_S
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointSaveError(
                    f"A rank has not written its part within {_EXIT_TIMEOUT_S:.0f} s after the program ended."
                )
        self._path = commit(self._writer, self._folder, step=self.step, keep=self._keep)

    def __repr__(self) -> str:
        state = "failed" if self._failure else "done" if self.done else f"{self.progress:.0%} written"
        return f"PendingSave(step={self.step}, {state})"


def commit(writer: TensorWriter, folder: CheckpointFolder, *, step: int, keep: int | None) -> Path:
    """Turn the parts written by all ranks into a checkpoint. Call it on one rank."""
    writer.write_index()
    return folder.finish(writer.draft, step=step, world_size=writer.world_size, keep=keep)


def finish_pending(
    peers: Peers, folder: CheckpointFolder, pending: PendingSave | None, clear: Callable[[], None]
) -> None:
    """Wait for the background save, if there is one. Collective.

    Args:
        peers: The ranks; one that was replaced has no save.
        folder: Destination of the save.
        pending: This rank's save.
        clear: Called when the outcome is known on all ranks, before an error is raised.

    Raises:
        CheckpointSaveError: the save failed; raised on all ranks.
    """
    everyone = peers.gather(None if pending is None else (pending.step, pending.token, pending.part_outcome()))
    if not any(everyone):
        return
    step, token, _ = next(state for state in everyone if state)
    failures = [f"rank {rank}: {state[2]}" for rank, state in enumerate(everyone) if state and state[2]]
    replaced = [rank for rank, state in enumerate(everyone) if not state or state[1] != token]
    failures += [f"rank {rank} was replaced and did not take part" for rank in replaced]
    if pending is not None:
        if failures:
            pending.abort()
        elif text := pending.outcome():
            failures.append(f"rank {peers.rank}: {text}")
    saved, errors = peers.run_on_first(
        lambda: (folder.is_committed(token), failures), error=CheckpointSaveError, what="Reading the folder failed"
    )
    clear()
    if not saved:
        if peers.rank == 0:
            folder.discard(folder.path / token)
        raise CheckpointSaveError(f"The background save of step {step} failed: {'; '.join(errors)}. Save again.")


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
