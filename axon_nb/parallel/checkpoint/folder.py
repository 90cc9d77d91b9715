"""The folder of checkpoints, the ranks that share it, and the errors that all of them raise.

    step_00000010/      complete: `manifest.json` lists its files and their sizes
    step_00000010.1/    the same step, saved again
    .saving_…/          being written, or left by an interrupted save
    .removing_…/        being removed

A checkpoint gets its name by one rename after all its files are on disk, so it is never visible half-written.

CheckpointError                   base; raised on all ranks alike
 ├── CheckpointNotFoundError      there is no checkpoint of that step, or none at all
 ├── CorruptCheckpointError       a checkpoint is incomplete: files are missing or truncated
 ├── CheckpointMismatchError      it does not fit the model or the optimizer: names or shapes differ
 └── CheckpointSaveError          it could not be written; the last good one remains
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from msgspec import Struct

from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.errors import AxonError

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_FORMAT = 1


class CheckpointError(AxonError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError):
    """There is no such checkpoint."""


class CorruptCheckpointError(CheckpointError):
    """The checkpoint is incomplete."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is of another model or optimizer."""


class CheckpointSaveError(CheckpointError):
    """The checkpoint could not be written."""


class CheckpointWarning(UserWarning):
    """The run was resumed, but differs from an uninterrupted one."""


class Manifest(Struct, frozen=True):
    """The description stored in a checkpoint."""

    step: int
    serial: int
    """Number of the save in this folder; the highest is the latest, whatever its step."""
    world_size: int
    """Number of ranks that wrote it."""
    files: dict[str, int]
    """Size of each file in bytes."""
    token: str
    """Identifies the save that created it."""
    path: Path
    """Folder of the checkpoint."""


class CheckpointFolder:
    """Checkpoints on disk; one rank writes, all can read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def complete(self) -> list[Manifest]:
        """Return the checkpoints that have a manifest, in the order in which they were saved."""
        manifests = [manifest for path in self._candidates() if (manifest := _read(path)) is not None]
        return sorted(manifests, key=lambda manifest: manifest.serial)

    def find(self, step: int) -> Manifest:
        """Return the checkpoint of a step; the latest if there are several.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: it is incomplete.
        """
        matching = [manifest for manifest in self.complete() if manifest.step == step]
        if matching:
            check(matching[-1])
            return matching[-1]
        for path in self._candidates():
            if _step_of(path) == step:
                raise CorruptCheckpointError(f"{path} has no readable {_MANIFEST}, so it is incomplete; remove it.")
        steps = sorted({manifest.step for manifest in self.complete()})
        available = f"available: {', '.join(map(str, steps))}" if steps else "there are no checkpoints"
        raise CheckpointNotFoundError(f"{self.path} has no checkpoint of step {step}; {available}.")

    def start(self) -> Path:
        """Remove leftovers of interrupted saves, and create a folder for the next one."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.path.glob(".saving_*"), *self.path.glob(".removing_*")):
            shutil.rmtree(leftover)
        draft = self.path / f".saving_{secrets.token_hex(8)}"
        draft.mkdir()
        return draft

    def finish(self, draft: Path, *, step: int, world_size: int, keep: int | None) -> Path:
        """Turn a written folder into a checkpoint, then remove surplus ones."""
        serial = max((manifest.serial for manifest in self.complete()), default=0) + 1
        files = {
            item.name: item.stat().st_size for item in sorted(draft.iterdir()) if not item.name.startswith(".done")
        }
        record: dict[str, Any] = {
            "format": _FORMAT,
            "step": step,
            "serial": serial,
            "world_size": world_size,
            "files": files,
        }
        record["token"] = draft.name
        (draft / _MANIFEST).write_text(json.dumps(record, indent=1), encoding="utf-8")
        sync_file(draft / _MANIFEST)
        for leftover in draft.glob(".done*"):
            leftover.unlink()
        sync_folder(draft)
        target = self._free_name(step)
        draft.rename(target)
        sync_folder(self.path)
        self._retain(keep, replaced=step)
        return target

    def is_committed(self, token: str) -> bool:
        """Whether the save with this token has become a checkpoint."""
        return any(manifest.token == token for manifest in self.complete())

    def discard(self, draft: Path) -> None:
        """Remove what a failed save has written."""
        shutil.rmtree(draft, ignore_errors=True)

    def _retain(self, keep: int | None, *, replaced: int) -> None:
        existing = self.complete()
        last = existing[-1]
        old = [manifest for manifest in existing[:-1] if manifest.step == replaced]
        others = [manifest for manifest in existing if manifest not in old and manifest is not last]
        if keep is not None:
            old += others[: max(0, len(others) - (keep - 1))]
        for manifest in old:
            # Renamed first, so that an interrupted removal leaves nothing that looks like a checkpoint.
            removed = self.path / f".removing_{manifest.path.name}_{secrets.token_hex(4)}"
            manifest.path.rename(removed)
            shutil.rmtree(removed)

    def _free_name(self, step: int) -> Path:
        target, number = self.path / f"step_{step:08d}", 0
        while target.exists():
            number += 1
            target = self.path / f"step_{step:08d}.{number}"
        return target

    def _candidates(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted(item for item in self.path.iterdir() if _NAME.fullmatch(item.name) and item.is_dir())


def check(manifest: Manifest) -> None:
    """Check that every file exists and has its recorded size.

    Raises:
        CorruptCheckpointError: a file is missing or has another size.
    """
    for name, size in manifest.files.items():
        path = manifest.path / name
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            how = "is missing" if actual is None else f"has {actual} bytes"
            raise CorruptCheckpointError(
                f"{path} {how}, but should have {size} bytes; load another step or copy it again."
            )


def sync_file(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _read(path: Path) -> Manifest | None:
    try:
        record: dict[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        return Manifest(record["step"], record["serial"], record["world_size"], record["files"], record["token"], path)
    except (OSError, ValueError, KeyError, TypeError):
        return None


Failure = tuple[CheckpointError | None, str] | None


class Peers:
    """Ranks of a group that all make the same calls.

    Args:
        group: The group; None: all ranks, or this process alone if there is no world.
    """

    def __init__(self, group: GroupLike | Any = None) -> None:
        single = group is None and not dist.is_initialized()
        self._group: ProcessGroup | None = None if single else resolve(group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self._group is None else self._group.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self._group is None else self._group.size()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on all of them. Collective."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self._group.torch_group)
        return everyone

    def run_on_first(self, function: Callable[[], Any], *, error: type[CheckpointError], what: str) -> Any:
        """Run `function` on rank 0 and return its result on all ranks. Collective.

        Raises:
            CheckpointError: it failed; raised on all ranks. Other exceptions are converted to `error`.
        """
        outcome = [_attempt(function) if self.rank == 0 else None]
        if self._group is not None:
            dist.broadcast_object_list(outcome, self._group.ranks[0], group=self._group.torch_group)
        assert outcome[0] is not None
        value, failure = outcome[0]
        _raise_first([failure], error, what)
        return value

    def run_on_all(self, function: Callable[[], Any], *, error: type[CheckpointError], what: str) -> list[Any]:
        """Run `function` on every rank and return all results on all ranks. Collective.

        Raises:
            CheckpointError: it failed on a rank; raised on all ranks. Other exceptions are converted to `error`.
        """
        outcomes = self.gather(_attempt(function))
        _raise_first([failure for _, failure in outcomes], error, what)
        return [value for value, _ in outcomes]


def _attempt(function: Callable[[], Any]) -> tuple[Any, Failure]:
    try:
        return function(), None
    except CheckpointError as error:
        return None, (error, "")
    except Exception as error:
        return None, (None, describe(error))


def describe(error: BaseException) -> str:
    """Describe an error by the underlying OSError if there is one: torch may report only a consequence of it."""
    shown: BaseException | None = error
    while shown is not None and not isinstance(shown, OSError):
        shown = shown.__cause__ or shown.__context__
    shown = shown or error
    where = traceback.extract_tb(shown.__traceback__)[-1:]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in where)
    return f"{type(shown).__name__}: {shown}{place}"


def _raise_first(failures: list[Failure], kind: type[CheckpointError], what: str) -> None:
    for rank, failure in enumerate(failures):
        if failure is not None:
            error, text = failure
            raise error if error is not None else kind(f"{what} on rank {rank}: {text}")
