"""Prepares frameworks for ranks: environment variables that select the device, and torch.compile.

torchrun's variables are set elsewhere. Private hook: Dynamo's list of skipped code. If a compiled model communicates,
Dynamo would also try to compile the methods of recoverable groups and fail, because their objects are opaque to it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType

from axon_nb.records.environment import DEEPSPEED_ACCELERATOR
from axon_nb.records.hooks import missing_hooks

_PACKAGES = ("axon_nb.comm", "axon_nb.engine", "axon_nb.records", "axon_nb.shell")


def set_environment(device: str, *, local_rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that Accelerate, transformers and DeepSpeed read; call it before any of them is imported.

    Args:
        device: Device of this rank: ``cpu`` or ``cuda:<index>``.
        local_rank: Local rank on this host.
        environ: The process's environment.
    """
    environ["ACCELERATE_TORCH_DEVICE"] = device
    if device == "cpu":
        # Otherwise each rank trains alone: https://github.com/huggingface/accelerate/issues/2741
        environ["ACCELERATE_USE_CPU"] = "true"
        # Otherwise DeepSpeed would use a GPU if the machine has one.
        environ.setdefault(DEEPSPEED_ACCELERATOR.name, DEEPSPEED_ACCELERATOR.default)
    elif device != f"cuda:{local_rank}":
        # Ranks share a GPU: Accelerate would wrap models for the GPU with the local rank's index.
        environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    _find_ninja(environ)


def _find_ninja(environ: MutableMapping[str, str]) -> None:
    """Put ninja, with which DeepSpeed builds C++, on the PATH: kernels lack the folder of Python packages' programs."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja", path=environ.get("PATH")) is None and (beside / "ninja").exists():
        environ["PATH"] = os.pathsep.join(filter(None, [environ.get("PATH"), str(beside)]))


def skip_axon_nb_code(trace_rules: ModuleType) -> None:
    """Make Dynamo run our communication code as it is instead of compiling it.

    Args:
        trace_rules: The module ``torch._dynamo.trace_rules``, just imported.
    """
    if not missing_hooks("compat.dynamo", trace_rules=trace_rules):
        for package in _PACKAGES:
            trace_rules.add(package)
