"""Checks in child processes, which may crash or hang: each has a time limit, and failures have a reason."""

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


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a child process."""

    content: dict[str, Any] = field(default_factory=dict)
    """The JSON object that it printed; empty if it printed none."""
    failure: str = ""
    """Why there is no content; empty otherwise."""
    stderr: str = ""


class Child:
    """A Python process that prints one JSON object; starts at once, `answer` waits for it."""

    def __init__(self, arguments: Sequence[str], *, timeout_s: float) -> None:
        """Start the process.

        Args:
            arguments: Arguments of this Python interpreter.
            timeout_s: Time limit in seconds, from now.
        """
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        # Files, not pipes: a leftover grandchild could keep a pipe open.
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
        """Wait for the output, or the reason why there is none; kill the process at the time limit."""
        try:
            code: int | None = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        out, err = _text(self._out), _text(self._err)
        self.close()
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "").removeprefix(
            f"{sys.executable}: "
        )
        if code is None:
            how = f"timed out after {self._timeout_s:g} s"
            return Answer(failure=f"{last} ({how})" if last else how, stderr=err)
        content = _last_object(out)
        if content:
            return Answer(content, stderr=err)
        how = f"killed by {_signal(-code)}" if code < 0 else f"exit code {code}" if code else "its output is not JSON"
        return Answer(failure=f"{last} ({how})" if last else how, stderr=err)

    def close(self) -> None:
        """Kill it and everything it started in its own session."""
        if not self._out.closed:
            if self._process.poll() is None:
                with contextlib.suppress(OSError):  # it leads its process group and has not been reaped
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
    """Find the JSON object on standard output; libraries may have printed other lines before it."""
    for candidate in [text, *reversed(text.splitlines())]:
        with contextlib.suppress(ValueError):
            value = json.loads(candidate)
            if isinstance(value, dict):
                return value
    return {}
