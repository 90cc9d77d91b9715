"""Available GPUs according to `nvidia-smi`: CUDA itself must not be initialised here.

A process that has initialised CUDA cannot be forked, so neither the notebook nor the agent asks torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from axon_nb.records.environment import VISIBLE_GPUS

__all__ = ["Gpu", "list_gpus"]

_BUSY_BYTES = 512 << 20
_QUERY = "index,uuid,name,memory.total,memory.used"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host."""

    index: int
    """The driver's index, as used in `CUDA_VISIBLE_DEVICES`."""
    name: str
    total_bytes: int
    used_bytes: int

    @property
    def busy(self) -> bool:
        """Whether more than half a GiB of its memory is in use."""
        return self.used_bytes > _BUSY_BYTES


def list_gpus() -> list[Gpu]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, in its order; empty without a driver.

    Follows CUDA's rules: the first entry that matches no GPU ends the list; a duplicate or ambiguous entry hides all
    GPUs.
    """
    cards = [card for line in _query().splitlines() if (card := _parse(line)) is not None]
    visible = os.environ.get(VISIBLE_GPUS.name)
    if visible is None:
        return [gpu for _, gpu in cards]
    chosen: list[Gpu] = []
    for item in (entry.strip() for entry in visible.split(",")):
        matching = [gpu for uuid, gpu in cards if item and (item == str(gpu.index) or uuid.startswith(item))]
        if not matching:
            break
        if len(matching) > 1 or matching[0] in chosen:
            return []
        chosen.append(matching[0])
    return chosen


def _parse(line: str) -> tuple[str, Gpu] | None:
    fields = line.split(", ")
    if len(fields) < 5 or not fields[0].isdigit():
        return None
    total, used = (int(text) << 20 if text.isdigit() else 0 for text in fields[-2:])
    return fields[1], Gpu(int(fields[0]), ", ".join(fields[2:-2]), total, used)


def _query() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
