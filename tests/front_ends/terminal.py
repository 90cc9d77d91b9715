"""IPython in a terminal, as a person has it: a process behind a pseudo-terminal that is typed into and read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType

import psutil

from tests.support.script import command_lines, family, script_environment

_LAUNCH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "IPython", *sys.argv[1:]])
"""
"""Makes the pseudo-terminal the one that Ctrl-C is typed on, then becomes IPython."""
_OPTIONS = ("--no-banner", "--simple-prompt", "--no-confirm-exit", "--colors=nocolor")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>][0-9A-Za-z]?|\r")
_LIMIT_S = 150.0


class Terminal:
    """One session; `text` is all that the screen has shown, without colours."""

    def __init__(self, cwd: Path) -> None:
        self._keyboard, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 240, 0, 0))
        environment = script_environment(TERM="dumb", COLUMNS="240", LINES="60")
        self._mark = environment["AXON_NB_TEST_SCRIPT"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *_OPTIONS],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
        os.close(screen)
        self.text = ""
        self._number = 1
        self._prompt(0)

    def type(self, text: str) -> None:
        """Type, without waiting for what comes of it."""
        os.write(self._keyboard, text.encode())

    def press_ctrl_c(self) -> None:
        """Interrupt what runs in the foreground."""
        self.type("\x03")

    def wait_for(self, text: str, *, since: int = 0) -> int:
        """Read until the screen shows `text` behind position `since`; returns where it ends.

        Raises:
            TimeoutError: it did not come, or the session has ended.
        """
        end = time.monotonic() + _LIMIT_S
        while (at := self.text.find(text, since)) < 0:
            if time.monotonic() > end or not self._read():
                raise TimeoutError(f"no {text!r}; the screen shows:\n{self.text[since:]}")
        return at + len(text)

    def submit(self, cell: str) -> int:
        """Type a cell; returns the position on the screen at which what comes of it begins."""
        since = len(self.text)
        # With plain prompts IPython takes two empty lines for the end of a cell that begins with a magic.
        self.type(f"{cell}\n" if "\n" not in cell else f"{cell}\n\n\n")
        return since

    def collect(self, since: int) -> str:
        """What has been shown from a position to the next prompt, what was typed included."""
        self._number += 1
        end = self._prompt(since)
        return self.text[since:end]

    def run(self, cell: str) -> str:
        """Type a cell and wait for the next prompt; returns what was shown, what was typed included."""
        return self.collect(self.submit(cell))

    def leave(self) -> int:
        """Type `exit`; returns the exit status."""
        self.type("exit\n")
        while self._read():
            pass
        return self.process.wait(_LIMIT_S)

    def left(self) -> list[str]:
        """Command lines of what it has left running."""
        return command_lines(family(self._mark))

    def _prompt(self, since: int) -> int:
        return self.wait_for(f"In [{self._number}]: ", since=since)

    def _read(self) -> bool:
        """Take in what has come; False when nothing will come any more."""
        ready, _, _ = select.select([self._keyboard], [], [], 1.0)
        if not ready:
            return self.process.poll() is None
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # the other side is closed
            return False
        self.text += _CONTROL.sub("", data.decode(errors="replace"))
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self._keyboard)
        for process in family(self._mark):  # ranks outlive a session that was killed
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
