"""A folder of checkpoints: save, resume on any number of ranks, keep the last few."""

from __future__ import annotations

import dataclasses
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from axon_nb.parallel.checkpoint.errors import (
    BrokenCheckpoint,
    CheckpointError,
    CheckpointWarning,
    SaveFailed,
)
from axon_nb.parallel.checkpoint.folder import CheckpointFolder, Manifest, check
from axon_nb.parallel.checkpoint.loading import restore
from axon_nb.parallel.checkpoint.optimizers import Optimizers
from axon_nb.parallel.checkpoint.peers import Peers
from axon_nb.parallel.checkpoint.preparing import Contents, prepare
from axon_nb.parallel.checkpoint.saving import PendingSave, commit, settle
from axon_nb.parallel.checkpoint.tensors import TensorWriter

__all__ = ["Checkpoints", "Resumed"]

_NOT_SAVED = "the checkpoint could not be written"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a checkpoint says besides the states it has set."""

    step: int
    """As it was saved."""
    extra: Any
    """As it was saved; by rank 0, where the number of ranks has changed."""
    world_size: int
    """Ranks that saved it."""
    path: Path
    """Its folder."""


class Checkpoints:
    """Checkpoints of one training run, in one folder that all ranks see.

    A checkpoint is written beside the others and gets its name when all of it is on the disk: killed at any moment, a
    run leaves the last good one. What was cut off is removed by the next save. The format of the tensors is that of
    torch.distributed.checkpoint, one folder a checkpoint. Load only what you trust: reading it can run code.

        checkpoints = Checkpoints("runs/gpt", keep=3)
        resumed = checkpoints.load_latest(model=model, optimizer=optimizer, sampler=sampler)
        for step in range(resumed.step + 1 if resumed else 0, steps):
            ...
            if step % 100 == 0:
                checkpoints.save(step, model=model, optimizer=optimizer, sampler=sampler, extra={"loss": loss})

    Models may be plain, in DDP, FSDP (ours or torch's), ZeRO-1, a `Pipeline` or `Parallel3D`, sharded by
    `fully_shard` or `parallelize`, or made of the layers of `axon_nb.parallel.tensor`; what was saved in one way on
    some ranks can be loaded in another on others.
    Every method but `steps`, `latest` and `path` is a collective: all ranks call it.

    Args:
        folder: Made when needed.
        keep: How many of the last saved ones are kept; None: all.
        group: The ranks that save and load together; None: all, or this process alone where there is no world.

    Raises:
        CheckpointError: `keep` is below 1.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3, group: Any = None) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep}: at least 1 checkpoint is kept; None keeps all.")
        self._folder = CheckpointFolder(folder)
        self._keep = keep
        self._group = group
        self._pending: PendingSave | None = None

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._folder.path

    def steps(self) -> list[int]:
        """The steps that can be loaded, in the order in which they were saved."""
        return [manifest.step for manifest in self._folder.whole()]

    @property
    def latest(self) -> int | None:
        """The step that was saved last; None: there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def path(self, step: int) -> Path:
        """The folder of a checkpoint.

        Raises:
            NoCheckpoint: there is none of that step.
            BrokenCheckpoint: it is not whole.
        """
        return self._folder.find(step).path

    def save(
        self, step: int, *, model: nn.Module, optimizer: Optimizers = None, extra: Any = None, **stateful: Any
    ) -> Path:
        """Write a checkpoint, and return when it is on the disk; collective.

        Random numbers of Python, NumPy, torch and CUDA are saved with it, those of each rank.

        Args:
            step: Number of the step; one that is there already is replaced when the new one is whole.
            model: Its parameters and buffers.
            optimizer: One, or several that share out the model's parameters.
            extra: Tensors, numbers, strings and containers of them: an epoch, a number of batches. Each rank's own.
            **stateful: Objects with `state_dict()` and `load_state_dict()`, such as schedulers, scalers, and loaders
                that can resume; or samplers with `set_epoch()`.

        Returns:
            The checkpoint's folder.

        Raises:
            SaveFailed: it could not be written, or one in the background could not; on all ranks. The last good one
                is still there.
            CheckpointError: something cannot be saved, ranks save different steps, or they see different folders.
        """
        peers, writer = self._prepare(step, model, optimizer, extra, stateful)
        try:
            peers.on_all(writer.write, error=SaveFailed, what=_NOT_SAVED)
            made = peers.on_first(
                lambda: commit(writer, self._folder, step=step, keep=self._keep).name, error=SaveFailed, what=_NOT_SAVED
            )
        except CheckpointError:
            if peers.rank == 0:
                self._folder.discard(writer.draft)
            raise
        return self.folder.joinpath(made)

    def async_save(
        self, step: int, *, model: nn.Module, optimizer: Optimizers = None, extra: Any = None, **stateful: Any
    ) -> PendingSave:
        """As `save`, but return when the tensors are copied; files are written in the background.

        One save goes on at a time: the next one, `wait` and loading wait for it. An error is raised by them.

        Returns:
            The save, with its progress.

        Raises:
            SaveFailed: the one before could not be written; this one has not begun.
            CheckpointError: as for `save`.
        """
        peers, writer = self._prepare(step, model, optimizer, extra, stateful)
        peers.on_all(writer.stage, error=SaveFailed, what="the tensors could not be copied")
        self._pending = PendingSave(step, writer, self._folder, keep=self._keep, wait=self.wait)
        self._pending.start()
        return self._pending

    def wait(self) -> None:
        """Return when nothing is written in the background any more; collective.

        Raises:
            SaveFailed: that could not be written; on all ranks.
        """
        self._settle(Peers(self._group))

    def load(
        self, step: int, *, model: nn.Module, optimizer: Optimizers = None, strict: bool = True, **stateful: Any
    ) -> Resumed:
        """Set model, optimizer and all else to what they were when a step was saved; collective.

        Resumed by as many ranks as saved it, a run goes on as if it had not stopped, to the last bit. By another
        number of ranks, what each rank kept for itself has no owner: `extra` and the objects get what rank 0 had
        saved, and random numbers are derived from step and rank; a CheckpointWarning says so.

        Args:
            step: Which.
            model: Made as before; what it is wrapped in, and on how many ranks, may differ.
            optimizer: Made of the same parameters; None: its state is not loaded.
            strict: The model has exactly the tensors of the checkpoint; otherwise what both have is loaded.
            **stateful: As for `save`, or some of them.

        Raises:
            NoCheckpoint: there is none of that step.
            BrokenCheckpoint: it is not whole.
            CheckpointMismatch: names or shapes differ; says which.
            CheckpointError: ranks see different folders.
        """
        peers = Peers(self._group)
        self._settle(peers)
        found = peers.on_first(lambda: self._folder.find(step), error=CheckpointError, what="reading the folder failed")
        return self._load(peers, found, model, optimizer, stateful, strict=strict)

    def load_latest(
        self, *, model: nn.Module, optimizer: Optimizers = None, strict: bool = True, **stateful: Any
    ) -> Resumed | None:
        """As `load`, of the last whole checkpoint that was saved; collective.

        Returns:
            None where there is none, with nothing changed: training begins.

        Raises:
            BrokenCheckpoint: none of those that are there is whole.
            CheckpointMismatch: names or shapes differ; says which.
            CheckpointError: ranks see different folders.
        """
        peers = Peers(self._group)
        self._settle(peers)
        found = peers.on_first(self._newest, error=CheckpointError, what="reading the folder failed")
        if found is None:
            return None
        manifest, broken = found
        if broken and peers.rank == 0:
            warnings.warn(f"{broken} Resuming from step {manifest.step}.", CheckpointWarning, stacklevel=2)
        return self._load(peers, manifest, model, optimizer, stateful, strict=strict)

    def _newest(self) -> tuple[Manifest, str] | None:
        told = ""
        for manifest in reversed(self._folder.whole()):
            try:
                check(manifest)
            except BrokenCheckpoint as error:
                told = told or str(error)
                continue
            return manifest, told
        if told:
            raise BrokenCheckpoint(f"no checkpoint in {self.folder} is whole: {told}")
        return None

    def _load(
        self,
        peers: Peers,
        found: Manifest,
        model: nn.Module,
        optimizer: Optimizers,
        stateful: dict[str, Any],
        *,
        strict: bool,
    ) -> Resumed:
        found = dataclasses.replace(found, path=self.folder / found.path.name)
        extra = restore(peers, found, model=model, optimizer=optimizer, stateful=stateful, strict=strict)
        if found.world_size != peers.size and peers.rank == 0:
            warnings.warn(
                f"step {found.step} was saved by {found.world_size} ranks and is resumed by {peers.size}: `extra` and "
                "samplers are those of rank 0, and random numbers are new ones.",
                CheckpointWarning,
                stacklevel=3,
            )
        return Resumed(found.step, extra, found.world_size, found.path)

    def _prepare(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizers,
        extra: Any,
        stateful: dict[str, Any],
    ) -> tuple[Peers, TensorWriter]:
        peers = Peers(self._group)
        self._settle(peers)
        contents = Contents(model, optimizer, extra, stateful)
        return peers, prepare(peers, self._folder, step, contents)

    def _settle(self, peers: Peers) -> None:
        settle(peers, self._folder, self._pending, self._forget)

    def _forget(self) -> None:
        self._pending = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what goes on in the background of this process: a copy on another rank has no part in it."""
        return {**self.__dict__, "_pending": None}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()

    def __repr__(self) -> str:
        return f"Checkpoints({os.fspath(self.folder)!r}, steps={self.steps()})"
