"""Plain scripts that use axon_nb, as processes of their own: whole ones, and one that is sent its lines."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.support.agent_server import agent_environment

ROOT = Path(__file__).resolve().parents[2]
MARK = "AXON_NB_TEST_SCRIPT"
"""The environment variable by which `family` finds what a script started."""


def script_environment(**changes: str) -> dict[str, str]:
    """The environment of a script; all that it starts carries a mark, by which `family` finds it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **agent_environment(), "PYTHONPATH": path, MARK: uuid.uuid4().hex, **changes}


def family(mark: str) -> list[psutil.Process]:
    """The living processes with this mark, but not this one."""
    members = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark:
                members.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return members


def command_lines(processes: Iterable[psutil.Process]) -> list[str]:
    """Of those that are still there."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    return lines


@dataclass(frozen=True)
class Finished:
    """A script that has ended."""

    code: int
    out: str
    err: str
    mark: str

    def left(self) -> list[str]:
        """Command lines of what it left running."""
        return command_lines(family(self.mark))


def run_script(code: str, *, timeout: float = 150.0, **changes: str) -> Finished:
    """Run a whole script to its end."""
    env = script_environment(**changes)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr, env[MARK])


@dataclass(frozen=True)
class Answer:
    """What some lines gave."""

    value: Any
    """Of the last expression; its text if that is not a plain value."""
    kinds: tuple[str, ...]
    """Names of the exception's classes; empty when none was raised."""
    message: str
    out: str
    err: str


class Script:
    """A plain Python process that is sent its lines."""

    def __init__(self, cwd: Path, **changes: str) -> None:
        env = script_environment(**changes)
        self.mark = env[MARK]
        self._errors = open(cwd / f"{self.mark}.err", "w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("child.py"))],
            env=env,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def submit(self, code: str) -> None:
        """Send lines; `collect` gives the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def collect(self, *, timeout: float = 150.0) -> Answer:
        """The answer to the earliest lines that have none yet.

        Raises:
            TimeoutError: it did not come in `timeout` seconds, or the process has ended.
        """
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise TimeoutError(f"no answer in {timeout} s; the process wrote:\n{self.errors()}")
        answer = json.loads(line)
        value = answer.get("value", "None")
        with contextlib.suppress(SyntaxError, ValueError):
            value = ast.literal_eval(value)
        return Answer(value, tuple(answer.get("kinds", ())), answer.get("message", ""), answer["out"], answer["err"])

    def run(self, code: str, *, timeout: float = 150.0) -> Answer:
        """Run lines, whatever becomes of them."""
        self.submit(code)
        return self.collect(timeout=timeout)

    def ok(self, code: str, *, timeout: float = 150.0) -> Answer:
        """Run lines that must not raise."""
        answer = self.run(code, timeout=timeout)
        assert not answer.kinds, f"{code}\n{answer.kinds[0]}: {answer.message}\n{answer.out}\n{answer.err}"
        return answer

    def value(self, code: str) -> Any:
        """The last expression's value."""
        return self.ok(code).value

    def errors(self) -> str:
        """What the process itself wrote to standard error."""
        self._errors.flush()
        return Path(self._errors.name).read_text()

    def others(self) -> list[psutil.Process]:
        """What it has started and still runs."""
        return [process for process in family(self.mark) if process.pid != self.process.pid]

    def end(self) -> int:
        """Let it come to its end; returns its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(150)
        self.process.stdout.close()
        self._errors.close()
        return code

    def __enter__(self) -> Script:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
