"""Fakes of NVIDIA's tools: an `nvidia-smi` that prints recorded output, and the driver's management library."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "doctor" / "nvml_driver.c"

A100X4 = """\
0, GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10, NVIDIA A100-SXM4-80GB, 81920, 4
1, GPU-8d2b6a44-7c1e-4f0b-8a3a-2b9e0c4d5f21, NVIDIA A100-SXM4-80GB, 81920, 79211
2, GPU-8d77aa10-02b3-9c4d-5e6f-708192a3b4c5, NVIDIA A100-SXM4-80GB, 81920, 4
3, GPU-f0e1d2c3-b4a5-9687-7869-5a4b3c2d1e0f, NVIDIA A100-SXM4-80GB, 81920, 512
"""
"""Four cards: 1 in use, 3 with exactly half a GiB in use."""

MIXED = """\
0, GPU-11111111-aaaa-bbbb-cccc-000000000000, NVIDIA GB10, [N/A], [N/A]
1, GPU-22222222-aaaa-bbbb-cccc-000000000000, NVIDIA RTX A6000, Engineering Sample, 49140, 1
Unable to determine the device handle for GPU2: 0000:41:00.0: Unknown Error
"""
"""A card that shares the host's memory, one with a comma in its name, one that has fallen off the bus."""

MIG = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-8d2b6a44-7c1e-4f0b-8a3a-2b9e0c4d5f21)
  MIG 3g.40gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 1c.3g.40gb  Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-8d77aa10-02b3-9c4d-5e6f-708192a3b4c5)
GPU 3: NVIDIA A100-SXM4-80GB (UUID: GPU-f0e1d2c3-b4a5-9687-7869-5a4b3c2d1e0f)
  MIG 7g.80gb     Device  0: (UUID: MIG-51b2c3d4-1111-5222-8333-944455556666)
"""
"""What `nvidia-smi -L` prints of these four: 1 and 3 are cut into instances."""

MIG_R450 = """\
GPU 0: A100-SXM4-80GB (UUID: GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10)
  MIG 3g.40gb Device 0: (UUID: MIG-GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10/1/0)
  MIG 3g.40gb Device 1: (UUID: MIG-GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10/2/0)
"""
"""The same by a driver before R470."""


class Driver:
    """Installs the program on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._patch = monkeypatch
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def prints(self, text: str, *, code: int = 0, listing: str = "") -> None:
        """From now on there are these cards; the program takes only the questions that the real one takes.

        Args:
            text: The answer to the query.
            code: Exit status.
            listing: What `nvidia-smi -L` prints.
        """
        query = "--query-gpu=index,uuid,name,memory.total,memory.used --format=csv,noheader,nounits"
        program = self._folder / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncase "$*" in\n  {shlex.quote(query)}) printf %s {shlex.quote(text)} ;;\n'
            f"  -L) printf %s {shlex.quote(listing)} ;;\n  *) exit 6 ;;\nesac\nexit {code}\n"
        )
        program.chmod(0o755)

    def shows(self, visible: str) -> None:
        """Set CUDA_VISIBLE_DEVICES."""
        self._patch.setenv("CUDA_VISIBLE_DEVICES", visible)


def needs_nvml(test: object) -> object:
    """Skip a test without nvidia-ml-py or a C compiler."""
    for missing, reason in (
        (find_spec("pynvml") is None, "needs nvidia-ml-py"),
        (shutil.which("cc") is None, "needs a C compiler"),
    ):
        test = pytest.mark.skipif(missing, reason=reason)(test)  # type: ignore[operator]
    return test


def build_library(folder: Path) -> Path:
    """Compile the library, which nvidia-ml-py loads, into `folder`, for LD_LIBRARY_PATH; return the folder."""
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    return folder
