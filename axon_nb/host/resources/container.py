"""The kind of container that this process runs in."""

from __future__ import annotations

import os
from pathlib import Path


def container_kind() -> str:
    """Return ``kubernetes``, ``docker``, ``podman`` or ``apptainer``; empty: no known container."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if Path("/.dockerenv").exists() else ""
