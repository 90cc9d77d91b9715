"""A rank on another host than the notebook: the files that a launcher copied there go when the rank does.

They hold the cluster's key. On the notebook's own host the agent removes its folder.
"""

from __future__ import annotations

import atexit
import shutil
import signal
from pathlib import Path
from typing import Any

__all__ = ["clean", "install_cleanup"]

_folders: list[Path] = []


def install_cleanup() -> None:
    """At the end of this process remove the folder of its connection file, if it is one of ours."""
    from ipyparallel.engine.app import IPEngine

    profile = Path(IPEngine.instance().profile_dir.location)
    # <base>/axon_nb-<uid>/<random>/profile, as it was copied: nothing else is ever removed, and on a disk that the
    # hosts share the folder is the host agent's, which has its own file in it.
    copied = not (profile.parent / "agent.json").exists()
    if copied and profile.name == "profile" and profile.parent.parent.name.startswith("axon_nb-"):
        _folders.append(profile.parent)
        atexit.register(clean)
        signal.signal(signal.SIGTERM, _on_sigterm)


def clean() -> None:
    """Remove what was copied here."""
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


def _on_sigterm(number: int, frame: Any) -> None:
    clean()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
