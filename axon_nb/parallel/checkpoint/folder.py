"""The folder of checkpoints: names, what is whole, what is left over, what is kept.

    step_00000010/      whole: `manifest.json` says which files it has and how long they are
    step_00000010.1/    the same step, saved once more
    .saving_…/          being written, or left by a save that was cut off
    .removing_…/        being removed

A checkpoint gets its name by one rename after all of its files are on the disk, so at no moment is there half of one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axon_nb.parallel.checkpoint.errors import BrokenCheckpoint, NoCheckpoint

__all__ = ["CheckpointFolder", "Manifest", "sync_file", "sync_folder"]

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    serial: int
    """Number of the save in this folder: the highest is the latest, whatever its step."""
    world_size: int
    """Ranks that wrote it."""
    files: dict[str, int]
    """Bytes of each file."""
    token: str
    """Of the save that made it."""
    path: Path
    """Its folder."""


class CheckpointFolder:
    """Checkpoints on a disk; used by one rank, or by all for reading.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def whole(self) -> list[Manifest]:
        """The checkpoints that have a manifest, in the order in which they were saved."""
        found = [manifest for path in self._named() if (manifest := _read(path)) is not None]
        return sorted(found, key=lambda manifest: manifest.serial)

    def find(self, step: int) -> Manifest:
        """The checkpoint of a step; the last one when there are several.

        Raises:
            NoCheckpoint: there is none.
            BrokenCheckpoint: it is not whole.
        """
        found = [manifest for manifest in self.whole() if manifest.step == step]
        if found:
            check(found[-1])
            return found[-1]
        for path in self._named():
            if _step_of(path) == step:
                raise BrokenCheckpoint(f"{path} has no {_MANIFEST} that can be read: it is half of one; remove it.")
        steps = sorted({manifest.step for manifest in self.whole()})
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none at all"
        raise NoCheckpoint(f"{self.path} has no checkpoint of step {step}: {there}.")

    def start(self) -> Path:
        """Clear what interrupted saves have left, and make a folder to write the next one into."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in (*self.path.glob(".saving_*"), *self.path.glob(".removing_*")):
            shutil.rmtree(left)
        draft = self.path / f".saving_{secrets.token_hex(8)}"
        draft.mkdir()
        return draft

    def finish(self, draft: Path, *, step: int, world_size: int, keep: int | None) -> Path:
        """Turn what was written into a checkpoint, then remove those that are too many."""
        serial = max((manifest.serial for manifest in self.whole()), default=0) + 1
        files = {
            item.name: item.stat().st_size for item in sorted(draft.iterdir()) if not item.name.startswith(".done")
        }
        told: dict[str, Any] = {
            "format": _FORMAT,
            "step": step,
            "serial": serial,
            "world_size": world_size,
            "files": files,
        }
        told["token"] = draft.name
        (draft / _MANIFEST).write_text(json.dumps(told, indent=1), encoding="utf-8")
        sync_file(draft / _MANIFEST)
        for left in draft.glob(".done*"):
            left.unlink()
        sync_folder(draft)
        target = self._free_name(step)
        draft.rename(target)
        sync_folder(self.path)
        self._retain(keep, replaced=step)
        return target

    def made_by(self, token: str) -> bool:
        """Whether the save that wrote to the folder of this name has made a checkpoint."""
        return any(manifest.token == token for manifest in self.whole())

    def discard(self, draft: Path) -> None:
        """Remove what a failed save has written."""
        shutil.rmtree(draft, ignore_errors=True)

    def _retain(self, keep: int | None, *, replaced: int) -> None:
        there = self.whole()
        last = there[-1]
        old = [manifest for manifest in there[:-1] if manifest.step == replaced]
        others = [manifest for manifest in there if manifest not in old and manifest is not last]
        if keep is not None:
            old += others[: max(0, len(others) - (keep - 1))]
        for manifest in old:
            # Renamed first: a removal that is cut off leaves nothing that looks like a checkpoint.
            going = self.path / f".removing_{manifest.path.name}_{secrets.token_hex(4)}"
            manifest.path.rename(going)
            shutil.rmtree(going)

    def _free_name(self, step: int) -> Path:
        target, number = self.path / f"step_{step:08d}", 0
        while target.exists():
            number += 1
            target = self.path / f"step_{step:08d}.{number}"
        return target

    def _named(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted(item for item in self.path.iterdir() if _NAME.fullmatch(item.name) and item.is_dir())


def check(manifest: Manifest) -> None:
    """Whether every file is there and as long as it was.

    Raises:
        BrokenCheckpoint: one is not.
    """
    for name, size in manifest.files.items():
        path = manifest.path / name
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            how = "is missing" if actual is None else f"has {actual} bytes"
            raise BrokenCheckpoint(f"{path} {how}, and was written with {size}: load another step, or copy it anew.")


def sync_file(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _read(path: Path) -> Manifest | None:
    try:
        told: dict[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        return Manifest(told["step"], told["serial"], told["world_size"], told["files"], told["token"], path)
    except (OSError, ValueError, KeyError, TypeError):
        return None
