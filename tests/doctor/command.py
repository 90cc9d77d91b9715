"""The command `axon-nb` as a process, and clusters in a folder of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What it printed as JSON."""
        return json.loads(self.out)


def axon_nb(*arguments: str, before: tuple[str, ...] = (), **env: str) -> Done:
    """Run `axon-nb` with these arguments.

    Args:
        arguments: Behind `axon-nb`.
        before: A program and its arguments that runs the command in other circumstances.
        env: Changes of the environment.
    """
    path = os.pathsep.join(filter(None, [env.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*before, sys.executable, "-m", "axon_nb.cli", *arguments],
        env={**os.environ, "PYTHONPATH": path, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)
