"""One save while it goes on: writing in the background, progress, the outcome."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from axon_nb.parallel.checkpoint.errors import SaveFailed
from axon_nb.parallel.checkpoint.folder import CheckpointFolder
from axon_nb.parallel.checkpoint.peers import Peers, describe
from axon_nb.parallel.checkpoint.tensors import TensorWriter

__all__ = ["PendingSave", "commit", "settle"]

_LOOK_S = 0.02
_AT_EXIT_S = 20.0


class PendingSave:
    """A save that goes on in the background; `Checkpoints.async_save` returns it.

    Every rank writes its part; rank 0 sees when all parts are there and gives the checkpoint its name. The threads talk
    through files alone, so a collective of training is never in their way.
    """

    step: int
    """Of the save."""

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
        self._part_over = threading.Event()
        self._stop = threading.Event()
        self._failure: str | None = None
        self._path: Path | None = None
        self._thread = threading.Thread(target=self._run, name=f"axon_nb-save-{step}", daemon=False)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    @property
    def progress(self) -> float:
        """Share of this rank's bytes that are written, 0 to 1."""
        if self._part_over.is_set() and self._failure is None:
            return 1.0
        return min(1.0, self._writer.bytes_written / max(1, self._writer.bytes_total))

    @property
    def done(self) -> bool:
        """Whether nothing is left to do on this rank; on rank 0: the checkpoint is there, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """As `Checkpoints.wait`: return when the checkpoint is there; collective.

        Raises:
            SaveFailed: it could not be written; on all ranks.
        """
        self._wait()

    @property
    def failure(self) -> str | None:
        """What went wrong on this rank; None: nothing, up to now."""
        return self._failure

    def part_outcome(self) -> str | None:
        """Wait until this rank's part is written; returns what went wrong."""
        self._part_over.wait()
        return self._failure

    def outcome(self) -> str | None:
        """Wait until nothing is left to do on this rank; returns what went wrong."""
        self._thread.join()
        return self._failure

    def abandon(self) -> None:
        """Give up: another rank will not write its part."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._writer.write()
            self._part_over.set()
            if self._writer.rank == 0:
                self._finish()
        except Exception as error:
            self._failure = describe(error)
            if not threading.main_thread().is_alive():
                print(f"The checkpoint of step {self.step} was not saved: {self._failure}", file=sys.stderr)
        finally:
            self._part_over.set()

    def _finish(self) -> None:
        limit = None
        while not self._writer.all_written():
            if self._stop.wait(_LOOK_S) or not self._writer.draft.exists():
                raise SaveFailed("a rank has not written its part.")
            if limit is None and not threading.main_thread().is_alive():
                limit = time.monotonic() + _AT_EXIT_S
            if limit is not None and time.monotonic() > limit:
                raise SaveFailed(f"a rank has not written its part {_AT_EXIT_S:.0f} s after the end of the program.")
        self._path = commit(self._writer, self._folder, step=self.step, keep=self._keep)

    def __repr__(self) -> str:
        state = "failed" if self._failure else "done" if self.done else f"{self.progress:.0%} written"
        return f"PendingSave(step={self.step}, {state})"


def commit(writer: TensorWriter, folder: CheckpointFolder, *, step: int, keep: int | None) -> Path:
    """Turn the parts that all ranks have written into a checkpoint; on one rank."""
    writer.write_index()
    return folder.finish(writer.draft, step=step, world_size=writer.world_size, keep=keep)


def settle(peers: Peers, folder: CheckpointFolder, pending: PendingSave | None, forget: Callable[[], None]) -> None:
    """Wait for the save in the background, if there is one; collective.

    Args:
        peers: The ranks; one that was replaced has no save.
        folder: Where it goes.
        pending: This rank's save.
        forget: Called when its outcome is known to all, before it is told.

    Raises:
        SaveFailed: it was not saved; on all ranks.
    """
    everyone = peers.gather(None if pending is None else (pending.step, pending.token, pending.part_outcome()))
    if not any(everyone):
        return
    step, token, _ = next(state for state in everyone if state)
    failures = [f"rank {rank}: {state[2]}" for rank, state in enumerate(everyone) if state and state[2]]
    gone = [rank for rank, state in enumerate(everyone) if not state or state[1] != token]
    failures += [f"rank {rank} has no part in it, as it was replaced" for rank in gone]
    if pending is not None:
        if failures:
            pending.abandon()
        elif text := pending.outcome():
            failures.append(f"rank {peers.rank}: {text}")
    saved, why = peers.on_first(
        lambda: (folder.made_by(token), failures), error=SaveFailed, what="reading the folder failed"
    )
    forget()
    if not saved:
        if peers.rank == 0:
            folder.discard(folder.path / token)
        raise SaveFailed(f"step {step} was not saved in the background: {'; '.join(why)}; save again.")
