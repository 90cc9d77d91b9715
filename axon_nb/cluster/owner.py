"""Who this notebook is, so that it finds its own cluster again after a kernel restart."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from axon_nb.records.environment import SESSION_NAME

__all__ = ["default_name", "owner_id"]


def _kernel_file() -> str:
    app = sys.modules.get("ipykernel.kernelapp")
    if app is not None and app.IPKernelApp.initialized():
        return Path(app.IPKernelApp.instance().connection_file).stem
    return ""


def owner_id() -> str:
    """The same before and after a restart of the kernel: its connection file keeps its name. In a script: the pid."""
    return _kernel_file() or f"pid-{os.getpid()}"


def default_name() -> str:
    """What a cluster is called if the user does not say: the notebook's name where the server tells it."""
    session = SESSION_NAME.get()
    stem = Path(session).stem if session.endswith(".ipynb") else ""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", stem)[:32].strip("._-") or "default"
