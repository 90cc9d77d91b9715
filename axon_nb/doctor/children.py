"""Examinations in a process of their own, which may crash or hang: each has a limit, and ends with its reason."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Answer", "Child"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a child has given."""

    content: dict[str, Any] = field(default_factory=dict)
    """The JSON object that it printed; empty when it printed none."""
    failure: str = ""
    """Why there is no content, in words; empty when there is."""
    stderr: str = ""


class Child:
    """A Python process that prints one JSON object; started at once, waited for in `answer`."""

    def __init__(self, arguments: Sequence[str], *, timeout_s: float) -> None:
        """Start it.

        Args:
            arguments: Of the Python interpreter that runs this.
            timeout_s: How long it may run, from now.
        """
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        # Files, not pipes: what the child leaves behind may keep a pipe open.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        parent = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), parent]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def answer(self) -> Answer:
        """What it printed, or why it did not; at the limit it is ended."""
        try:
            code: int | None = self._process.wait(max(0.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        out, err = _text(self._out), _text(self._err)
        self.close()
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "").removeprefix(
            f"{sys.executable}: "
        )
        if code is None:
            how = f"not over after {self._timeout_s:g} s"
            return Answer(failure=f"{last} ({how})" if last else how, stderr=err)
        content = _last_object(out)
        if content:
            return Answer(content, stderr=err)
        how = f"ended by {_signal(-code)}" if code < 0 else f"exit status {code}" if code else "its output is no JSON"
        return Answer(failure=f"{last} ({how})" if last else how, stderr=err)

    def close(self) -> None:
        """End it, and all that it has started and not given a session of its own."""
        if not self._out.closed:
            if self._process.poll() is None:
                with contextlib.suppress(OSError):  # it leads its process group, and nobody else has waited for it
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._out.close()
            self._err.close()


def _text(file: Any) -> str:
    file.seek(0)
    return bytes(file.read()).decode(errors="replace")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_object(text: str) -> dict[str, Any]:
    """The JSON object on standard output; libraries may have printed lines before it."""
    for candidate in [text, *reversed(text.splitlines())]:
        with contextlib.suppress(ValueError):
            found = json.loads(candidate)
            if isinstance(found, dict):
                return found
    return {}
