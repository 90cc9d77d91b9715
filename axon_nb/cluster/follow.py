"""Following a cell that a notebook before this one has sent: its output and its end are fetched from the ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from axon_nb.cluster.cell import CellRun
from axon_nb.cluster.client import RankClient

__all__ = ["Follower"]

_EVERY_S = 0.1
_NEVER_CAME_S = 2.0
"""A rank that is idle and does not know the cell for this long never got it."""


class Follower:
    """Asks the ranks of one cell ten times a second over the control channel, which answers while they are busy.

    Fetching, rather than listening, loses nothing and shows nothing twice: each answer begins where the one before
    ended. What came to be lost before anyone asked is told in a note.

    Args:
        client: The cluster's client.
        run: The cell in this notebook.
    """

    def __init__(self, client: RankClient, run: CellRun) -> None:
        self._client = client
        self._run = run
        self._last: dict[int, int] = {}
        self._asked: dict[int, Any] = {}
        self._due = 0.0
        self._idle_since: dict[int, float] = {}

    def step(self, now: float) -> None:
        """Hand on what has come, and ask again when it is due."""
        for rank, future in list(self._asked.items()):
            if future.done():
                del self._asked[rank]
                self._take(rank, future.result()["content"], now)
        if now < self._due:
            return
        self._due = now + _EVERY_S
        for rank in self._run.unfinished:
            if rank not in self._asked:
                with contextlib.suppress(KeyError):  # it is gone; the host agent tells
                    since = self._last.get(rank, 0)
                    self._asked[rank] = self._client.request(rank, "axon_cells", run=self._run.token, since=since)

    def _take(self, rank: int, content: Mapping[str, Any], now: float) -> None:
        if rank not in self._run.unfinished:
            return
        if content.get("cells"):
            self.feed(rank, content["cells"][0])
        elif content.get("running", True):
            self._idle_since.pop(rank, None)
        elif now - self._idle_since.setdefault(rank, now) > _NEVER_CAME_S:
            why = "the notebook went away before it had sent the cell to this rank"
            self._end(rank, {"status": "error", "ename": "CellLost", "evalue": why})

    def feed(self, rank: int, report: Mapping[str, Any]) -> None:
        """Hand on one rank's report."""
        run = self._run
        if note := _cut_note(report["cut"], first=rank not in self._last):
            run.on_output(rank, "stream", {"name": "stderr", "text": note}, {})
        self._last[rank] = report["last"]
        for kind, content in report["messages"]:
            run.on_output(rank, kind, content, {})
        if report["outcome"] is not None:
            self._end(rank, report["outcome"])

    def _end(self, rank: int, outcome: dict[str, Any]) -> None:
        self._run.on_idle(rank)
        self._run.on_reply(rank, outcome)

    def wait_for_late(self, limit_s: float) -> None:
        """After the cell was given up: go on until its stuck ranks have come back, at most `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while self._run.unfinished and not self._run.lost and time.monotonic() < end:
            self.step(time.monotonic())
            time.sleep(_EVERY_S)


def _cut_note(cut: Mapping[str, int], *, first: bool) -> str:
    parts = [
        f"{cut[name]:,} {noun}{'s' * (cut[name] != 1)}"
        for name, noun in (("lines", "line"), ("displays", "display"))
        if cut[name]
    ]
    if not (parts or cut["size"]):
        return ""
    when = "before the notebook came back" if first else "in between"
    return f"… {' and '.join(parts) or 'text'} ({cut['size'] / 1e3:.1f} kB) {when} not kept on the rank …\n"
