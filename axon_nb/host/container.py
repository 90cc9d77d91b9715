"""Which container this runs in: the fix of a limit is another one in each."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["kind"]


def kind() -> str:
    """``kubernetes``, ``docker``, ``podman``, ``apptainer``, or empty: no container that is known."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if Path("/.dockerenv").exists() else ""
