"""A fake of the driver's management library, which NVIDIA's own Python package loads in place of the real one."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["build_library", "needs_nvml"]

SOURCE = Path(__file__).resolve().parents[1] / "doctor" / "nvml_driver.c"


def needs_nvml(test: object) -> object:
    """Skip a test without nvidia-ml-py or a C compiler."""
    for missing, reason in (
        (find_spec("pynvml") is None, "needs nvidia-ml-py"),
        (shutil.which("cc") is None, "needs a C compiler"),
    ):
        test = pytest.mark.skipif(missing, reason=reason)(test)  # type: ignore[operator]
    return test


def build_library(folder: Path) -> Path:
    """Compile the library into `folder`, for LD_LIBRARY_PATH; return the folder."""
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    return folder
