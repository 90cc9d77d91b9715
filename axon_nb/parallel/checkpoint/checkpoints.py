"""`Checkpoints`: a folder of checkpoints to save, resume from on any number of ranks, and keep the last few of.

Loading restores model, optimizer, each rank's own state, and the position of a `ResumableSampler` in its epoch.

torch.distributed.checkpoint pickles its index, `.metadata`, and reads it with `pickle.load`, so an untrusted checkpoint
could run any code. Here only the records that make up an index are created.
"""

from __future__ import annotations

import enum
import importlib
import os
import pickle
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.data import Dataset, DistributedSampler

from axon_nb.errors import UsageError
from axon_nb.parallel.checkpoint import saving
from axon_nb.parallel.checkpoint.folder import (
    CheckpointError,
    CheckpointFolder,
    CheckpointMismatchError,
    CheckpointSaveError,
    CheckpointWarning,
    CorruptCheckpointError,
    Manifest,
    Peers,
    check,
)
from axon_nb.parallel.checkpoint.tensors import (
    Optimizers,
    OptimizerStates,
    Shards,
    TensorWriter,
    mismatches,
    model_state,
    plain_model,
    read_tensors,
    set_model_state,
)

_NOT_SAVED = "The checkpoint could not be written"
_MODEL, _OPTIMIZER = "model.", "optimizer.pt"
_SHOWN = 6
_RECORDS = "torch.distributed.checkpoint.metadata"
_OTHERS = frozenset(
    {
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("collections", "OrderedDict"),
    }
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a checkpoint contains besides the states that were loaded."""

    step: int
    """The step, as saved."""
    extra: Any
    """The value of `extra`, as saved; that of rank 0 if the number of ranks has changed."""
    world_size: int
    """Number of ranks that saved it."""
    path: Path
    """Folder of the checkpoint."""


class Checkpoints:
    """Checkpoints of one training run, in one folder that all ranks can access.

    A checkpoint is written beside the others and gets its name once it is completely on disk: if a run is killed at any
    moment, the last good one remains. The next save removes leftovers. Each checkpoint is a folder; tensors are in the
    format of torch.distributed.checkpoint.

        checkpoints = Checkpoints("runs/gpt", keep=3)
        resumed = checkpoints.load_latest(model=model, optimizer=optimizer, sampler=sampler)
        for step in range(resumed.step + 1 if resumed else 0, steps):
            ...
            if step % 100 == 0:
                checkpoints.save(step, model=model, optimizer=optimizer, sampler=sampler, extra={"loss": loss})

    Models can be plain, in DDP, FSDP (ours or torch's), ZeRO-1, a `Pipeline` or `Parallel3D`, sharded by
    `fully_shard` or `parallelize`, or built from the layers of `axon_nb.parallel.tensor`. A checkpoint saved with one
    layout and number of ranks can be loaded with another.
    All methods except `steps`, `latest` and `path` are collective: call them on all ranks.

    Args:
        folder: The folder; created if necessary.
        keep: Number of most recent checkpoints to keep; None keeps all.
        group: The ranks that save and load together. None: all, or this process alone if there is no world.

    Raises:
        UsageError: `keep` is below 1.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3, group: Any = None) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep must be at least 1, or None to keep all; got {keep}.")
        self._folder = CheckpointFolder(folder)
        self._keep = keep
        self._group = group
        self._pending: saving.PendingSave | None = None

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints."""
        return self._folder.path

    def steps(self) -> list[int]:
        """Return the steps that can be loaded, in the order in which they were saved."""
        return [manifest.step for manifest in self._folder.complete()]

    @property
    def latest(self) -> int | None:
        """The step that was saved last; None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def path(self, step: int) -> Path:
        """Return the folder of a checkpoint.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of that step.
            CorruptCheckpointError: the checkpoint is incomplete.
        """
        return self._folder.find(step).path

    def save(
        self, step: int, *, model: nn.Module, optimizer: Optimizers = None, extra: Any = None, **stateful: Any
    ) -> Path:
        """Write a checkpoint and return when it is on disk. Collective.

        The random states of Python, NumPy, torch and CUDA are saved with it, for each rank.

        Args:
            step: Number of the step; an existing checkpoint of the step is replaced once the new one is complete.
            model: The model; its parameters and buffers are saved.
            optimizer: One optimizer, or several that train different parameters of the model.
            extra: Tensors, numbers, strings and containers of them, such as an epoch or a batch count; per rank.
            **stateful: Objects with `state_dict()` and `load_state_dict()`, such as schedulers, scalers and resumable
                loaders; or samplers with `set_epoch()`.

        Returns:
            Folder of the checkpoint.

        Raises:
            CheckpointSaveError: this checkpoint, or the previous background save, could not be written; raised
                on all ranks. The last good checkpoint remains.
            CheckpointError: something cannot be saved, or ranks save different steps or see different folders.
        """
        peers, writer = self._prepare(step, model, optimizer, extra, stateful)
        try:
            peers.run_on_all(writer.write, error=CheckpointSaveError, what=_NOT_SAVED)
            name = peers.run_on_first(
                lambda: saving.commit(writer, self._folder, step=step, keep=self._keep).name,
                error=CheckpointSaveError,
                what=_NOT_SAVED,
            )
        except CheckpointError:
            if peers.rank == 0:
                self._folder.discard(writer.draft)
            raise
        return self.folder.joinpath(name)

    def async_save(
        self, step: int, *, model: nn.Module, optimizer: Optimizers = None, extra: Any = None, **stateful: Any
    ) -> saving.PendingSave:
        """Like `save`, but return once the tensors are copied; files are written in the background.

        Only one save runs at a time: the next one, `wait` and loading wait for it and raise its error.

        Returns:
            The save in progress.

        Raises:
            CheckpointSaveError: the previous save failed; this one has not started.
            CheckpointError: as for `save`.
        """
        peers, writer = self._prepare(step, model, optimizer, extra, stateful)
        peers.run_on_all(writer.stage, error=CheckpointSaveError, what="The tensors could not be copied")
        self._pending = saving.PendingSave(step, writer, self._folder, keep=self._keep, wait=self.wait)
        self._pending.start()
        return self._pending

    def wait(self) -> None:
        """Wait until the background save has finished. Collective.

        Raises:
            CheckpointSaveError: it failed; raised on all ranks.
        """
        self._finish_pending(Peers(self._group))

    def load(
        self, step: int, *, model: nn.Module, optimizer: Optimizers = None, strict: bool = True, **stateful: Any
    ) -> Resumed:
        """Restore model, optimizer and everything else from the checkpoint of a step. Collective.

        On as many ranks as saved it, the run continues bit for bit as if it had not stopped. On another number of
        ranks, per-rank values have no owner: `extra` and the objects get rank 0's, and random states are derived from
        step and rank; a CheckpointWarning says so.

        Args:
            step: The step to load.
            model: The model, built as before; its wrapper and the number of ranks may differ.
            optimizer: The optimizer of the same parameters; None: its state is not loaded.
            strict: Require exactly the tensors of the checkpoint; otherwise load those that both have.
            **stateful: The same as for `save`, or some of them.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of that step.
            CorruptCheckpointError: the checkpoint is incomplete.
            CheckpointMismatchError: names or shapes differ; the message lists them.
            CheckpointError: ranks see different folders.
        """
        peers = Peers(self._group)
        self._finish_pending(peers)
        manifest = peers.run_on_first(
            lambda: self._folder.find(step), error=CheckpointError, what="Reading the folder failed"
        )
        return self._load(peers, manifest, model, optimizer, stateful, strict=strict)

    def load_latest(
        self, *, model: nn.Module, optimizer: Optimizers = None, strict: bool = True, **stateful: Any
    ) -> Resumed | None:
        """Like `load`, for the last complete checkpoint that was saved. Collective.

        Returns:
            None, with nothing changed, if there is no checkpoint: training starts from scratch.

        Raises:
            CorruptCheckpointError: none of the existing checkpoints is complete.
            CheckpointMismatchError: names or shapes differ; the message lists them.
            CheckpointError: ranks see different folders.
        """
        peers = Peers(self._group)
        self._finish_pending(peers)
        latest = peers.run_on_first(self._latest_complete, error=CheckpointError, what="Reading the folder failed")
        if latest is None:
            return None
        manifest, broken = latest
        if broken and peers.rank == 0:
            warnings.warn(f"{broken} Resuming from step {manifest.step}.", CheckpointWarning, stacklevel=2)
        return self._load(peers, manifest, model, optimizer, stateful, strict=strict)

    def _latest_complete(self) -> tuple[Manifest, str] | None:
        broken_text = ""
        for manifest in reversed(self._folder.complete()):
            try:
                check(manifest)
            except CorruptCheckpointError as error:
                broken_text = broken_text or str(error)
                continue
            return manifest, broken_text
        if broken_text:
            raise CorruptCheckpointError(f"No checkpoint in {self.folder} is complete: {broken_text}")
        return None

    def _load(
        self,
        peers: Peers,
        manifest: Manifest,
        model: nn.Module,
        optimizer: Optimizers,
        stateful: dict[str, Any],
        *,
        strict: bool,
    ) -> Resumed:
        manifest = msgspec.structs.replace(manifest, path=self.folder / manifest.path.name)
        extra = restore(peers, manifest, model=model, optimizer=optimizer, stateful=stateful, strict=strict)
        if manifest.world_size != peers.size and peers.rank == 0:
            warnings.warn(
                f"Step {manifest.step} was saved by {manifest.world_size} ranks and is loaded by {peers.size}: `extra` "
                "and samplers are those of rank 0, and random states are new.",
                CheckpointWarning,
                stacklevel=3,
            )
        return Resumed(manifest.step, extra, manifest.world_size, manifest.path)

    def _prepare(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizers,
        extra: Any,
        stateful: dict[str, Any],
    ) -> tuple[Peers, TensorWriter]:
        peers = Peers(self._group)
        self._finish_pending(peers)
        contents = saving.Contents(model, optimizer, extra, stateful)
        return peers, saving.prepare(peers, self._folder, step, contents)

    def _finish_pending(self, peers: Peers) -> None:
        saving.finish_pending(peers, self._folder, self._pending, self._clear_pending)

    def _clear_pending(self) -> None:
        self._pending = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the background save, which belongs to this process."""
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
            states.restore(tensors, saving.read_plain(manifest.path / _OPTIMIZER))
        same = manifest.world_size == peers.size
        saved = saving.read_plain(manifest.path / f"rank_{peers.rank if same else 0:05d}.pt")
        saving.set_rank_state(saved, stateful, is_own=same, step=manifest.step, rank=peers.rank)
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


def _member(kind: Any, name: Any) -> Any:
    """Stands for `getattr`, by which early versions of Python 3.11 pickle the members of an enumeration."""
    if isinstance(kind, enum.EnumType) and kind.__module__ == _RECORDS and isinstance(name, str):
        return kind[name]
    raise CorruptCheckpointError("it refers to builtins.getattr, which the index of a checkpoint never contains.")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a record, a dtype, or one of a few others; refuse the rest."""
        # From Python 3.13 on, pathlib is a package and names its classes after a file in it.
        module = "pathlib" if module.startswith("pathlib.") else module
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == _RECORDS or (module, name) in _OTHERS:
            value = getattr(importlib.import_module(module), name, None)
            if (module, name) in _OTHERS or (isinstance(value, type) and value.__module__ == _RECORDS):
                return value
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CorruptCheckpointError(f"it refers to {module}.{name}, which the index of a checkpoint never contains.")


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a checkpoint.

    Raises:
        CorruptCheckpointError: it is not the index of a checkpoint, or would run code.
        OSError: it cannot be read.
    """
    path = folder / ".metadata"
    with path.open("rb") as file:
        try:
            index = _Unpickler(file).load()
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path} was not read: {error}") from None
        except Exception as error:
            raise CorruptCheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from error
    if not isinstance(index, Metadata):
        raise CorruptCheckpointError(f"{path} holds an object of type {type(index).__name__}, not the index.")
    return index


class ResumableSampler(DistributedSampler[Any]):
    """Distributes a dataset over ranks and can resume within an epoch.

    Pass it to `Checkpoints` as ``sampler=``. It counts the samples it has yielded. A DataLoader with workers fetches
    ahead of training, so before saving, call `set_position` with the number of samples that all ranks have trained on.
    Each iteration over a DataLoader draws a seed from torch's generator. Give the DataLoader its own generator
    (``generator=torch.Generator()``), so that a resumed run draws the same random numbers as an uninterrupted one.

    Args:
        dataset: The dataset.
        **options: Options of `DistributedSampler`.
    """

    def __init__(self, dataset: Dataset[Any], **options: Any) -> None:
        super().__init__(dataset, **options)
        self._position, self._finished = 0, False

    @property
    def position(self) -> int:
        """Number of samples of this epoch yielded on all ranks together."""
        return self._position

    def set_position(self, samples: int) -> None:
        """Continue after this many samples of the epoch, counted over all ranks.

        Raises:
            UsageError: the epoch has fewer samples.
        """
        if not 0 <= samples <= self.total_size:
            raise UsageError(f"position must be 0 to {self.total_size}, the samples of an epoch; got {samples}.")
        self._position, self._finished = samples, False

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; no effect if it is the current one."""
        if epoch != self.epoch:
            self._position, self._finished = 0, False
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's remaining samples; ranks take turns."""
        if self._finished:
            self._position, self._finished = 0, False
        for index in islice(super().__iter__(), self._num_yielded(), None):
            self._position += self.num_replicas
            yield index
        self._finished = True

    def __len__(self) -> int:
        """Return the number of remaining samples of this rank in the epoch."""
        return self.num_samples - (0 if self._finished else self._num_yielded())

    def _num_yielded(self) -> int:
        return min(self.num_samples, -(-self._position // self.num_replicas))

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of its samples yielded on all ranks together."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at a saved position, on any number of ranks."""
        super().set_epoch(state["epoch"])
        self.set_position(min(state["position"], self.total_size))
