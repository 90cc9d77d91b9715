"""Which GPUs this user may take, asked of the driver's management library: CUDA itself must not be touched here.

A process that has initialised CUDA cannot be forked, so neither the notebook nor the agent ever asks torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

__all__ = ["Gpu", "list_gpus"]

_BUSY_BYTES = 512 << 20
_QUERY = "index,uuid,name,memory.total,memory.used"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host."""

    index: int
    """Number as the driver counts, which is what `CUDA_VISIBLE_DEVICES` takes."""
    name: str
    total_bytes: int
    used_bytes: int

    @property
    def busy(self) -> bool:
        """Whether someone else holds more than half a GiB of it."""
        return self.used_bytes > _BUSY_BYTES


def list_gpus() -> list[Gpu]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, in its order; empty where there is no driver."""
    rows = [line.split(", ") for line in _query().splitlines() if line.count(", ") >= 4]
    mib = 1 << 20
    gpus = {
        row[0]: (row[1], Gpu(int(row[0]), ", ".join(row[2:-2]), int(row[-2]) * mib, int(row[-1]) * mib)) for row in rows
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [gpu for _, gpu in gpus.values()]
    chosen = []
    for item in visible.split(","):
        found = [
            gpu
            for index, (uuid, gpu) in gpus.items()
            if item.strip() == index or (item and uuid.startswith(item.strip()))
        ]
        if not found or not item.strip():
            break  # as CUDA does: the first invalid entry ends the list
        chosen.append(found[0])
    return chosen


def _query() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
