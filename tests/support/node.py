"""Node, for tests of JavaScript."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from axon_nb.widgets.assets import script


def node(*arguments: str) -> str:
    """Run node and return what it prints."""
    command = shutil.which("node")
    if command is None:
        pytest.skip("needs node on the PATH")
    env = {**os.environ, "PYTHON": sys.executable}
    run = subprocess.run([command, *arguments], capture_output=True, text=True, check=False, timeout=150, env=env)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return run.stdout


def saved(name: str, folder: Path) -> str:
    """A script as the page gets it, as a file."""
    path = folder / f"{Path(name).name}.mjs"
    path.write_text(script(name), encoding="utf-8")
    return str(path)
