"""One program with a cluster of 3 ranks, for all tests of other programs that look at it and work on it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.command import Done, axon_nb
from tests.support.script import Script

_TIMEOUT_S = 100.0
HANG = "if rank == 1:\n    while not done_waiting():\n        pass\ndist.all_reduce(torch.ones(2))"
"""Rank 1 does not come to the collective until the file exists."""


class Owner:
    """The program that started the cluster, and the commands on it.

    Args:
        script: The program.
        folder: Where the clusters of these tests are, and files.
    """

    def __init__(self, script: Script, folder: Path) -> None:
        self.script = script
        self.folder = folder
        self._flag = folder / "go on"

    def command(self, *arguments: str) -> Done:
        """Run `axon-nb` on it."""
        return axon_nb(*arguments, AXON_NB_RUNTIME_DIR=str(self.folder))

    def json(self, *arguments: str) -> Any:
        """What a command that must work prints with ``--json``."""
        done = self.command(*arguments, "--json")
        assert done.code == 0, done
        return done.json()

    def lines(self, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        """The exit status of a command with ``--json``, and its lines."""
        done = self.command(*arguments, "--json")
        return done.code, [json.loads(line) for line in done.out.splitlines()]

    def error(self, *arguments: str) -> tuple[int, str, str]:
        """The exit status of a command that must fail with ``--json``; the code and the message of its error."""
        code, (line,) = self.lines(*arguments)
        return code, line["error"]["code"], line["error"]["message"]

    def share(self, on: bool) -> None:
        """Allow others to change something, or do not."""
        self.script.ok(f"current.session().settings.share = {on}")

    def hang(self) -> None:
        """Start a cell in which ranks 0 and 2 wait for rank 1 until `release`; return when they do."""
        self._flag.unlink(missing_ok=True)
        self.script.ok(f"h = c.run_noblock({HANG!r}, quiet=True)")
        end = time.monotonic() + _TIMEOUT_S
        while self.json("explain")["waited_for"] != "1":
            assert time.monotonic() < end

    def release(self) -> None:
        """Let the cell of `hang` end."""
        self._flag.touch()
        self.script.ok("h.wait(60)")

    def set_up(self) -> None:
        """Start the cluster and define what the cells use."""
        code = f"import os, time\ndef done_waiting(): time.sleep(0.05); return os.path.exists({str(self._flag)!r})"
        self.script.ok("import axon_nb\nfrom axon_nb.cluster.session import current")
        self.script.ok("c = axon_nb.start(3, devices='cpu', name='lab')", timeout=240)
        self.script.ok(f"c.run({code!r}, quiet=True)")


@pytest.fixture(scope="session")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """The program with the cluster ``lab``."""
    folder = tmp_path_factory.mktemp("r", numbered=True)
    with Script(folder, AXON_NB_RUNTIME_DIR=str(folder)) as script:
        made = Owner(script, folder)
        made.set_up()
        yield made
