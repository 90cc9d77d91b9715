"""Environment variables by which frameworks find out where this rank computes; torchrun's are set elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path

from axon_nb.records.environment import DEEPSPEED_ACCELERATOR

__all__ = ["set_environment"]


def set_environment(device: str, *, local_rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what Accelerate, transformers and DeepSpeed read, before any of them is imported.

    Args:
        device: Where this rank computes: ``cpu`` or ``cuda:<index>``.
        local_rank: Its number among the ranks of this host.
        environ: The process's environment.
    """
    environ["ACCELERATE_TORCH_DEVICE"] = device
    if device == "cpu":
        # Else each rank is the only process of its training: https://github.com/huggingface/accelerate/issues/2741
        environ["ACCELERATE_USE_CPU"] = "true"
        # On a machine with GPUs DeepSpeed would take one.
        environ.setdefault(DEEPSPEED_ACCELERATOR.name, DEEPSPEED_ACCELERATOR.default)
    elif device != f"cuda:{local_rank}":
        # Ranks that share a card: Accelerate would wrap models for the card of the rank's number.
        environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    _find_ninja(environ)


def _find_ninja(environ: MutableMapping[str, str]) -> None:
    """DeepSpeed builds C++ with ninja, which comes as a Python package: kernels do not have its folder on the path."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja", path=environ.get("PATH")) is None and (beside / "ninja").exists():
        environ["PATH"] = os.pathsep.join(filter(None, [environ.get("PATH"), str(beside)]))
