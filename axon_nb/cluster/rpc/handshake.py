"""Ranks that are registered, but not yet reached: asking again until each channel of theirs has answered.

ZeroMQ drops what is sent to a peer that has not connected yet. An engine connects its channels in the background, and
the controller tells of it as soon as one of them, the heartbeat's, has: on a machine that is busy the others follow
later. So what a rank is asked first may never come to it, and what it prints first may never come to the notebook.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.cells import execute_request

__all__ = ["hear", "reach"]

_AGAIN_S = 0.25
_LOOK_S = 0.02
_NOTHING = execute_request("", silent=True)


class _Heard:
    """Which ranks have answered on which channel; called on the client's IO thread."""

    def __init__(self) -> None:
        self.cells: set[int] = set()
        self.output: set[int] = set()
        self.control: set[int] = set()
        self.something = threading.Event()

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Nothing: an empty cell has none."""

    def on_idle(self, rank: int) -> None:
        self.output.add(rank)
        self.something.set()

    def on_reply(self, rank: int, content: dict[str, Any]) -> None:
        self.cells.add(rank)
        self.something.set()

    def on_control(self, rank: int) -> None:
        self.control.add(rank)
        self.something.set()

    def all(self) -> set[int]:
        return self.cells & self.output & self.control


def reach(client: RankClient, ranks: Iterable[int], *, timeout_s: float, give_up: Callable[[], bool]) -> list[int]:
    """Ask idle ranks for nothing until each has answered on its channels for cells, for control and for output.

    Args:
        client: The notebook's connection to the controller.
        ranks: Registered ranks that run no cell.
        timeout_s: How long to go on, in seconds.
        give_up: Called every 20 ms; whether to end before that.

    Returns:
        The ranks that were not reached.
    """
    waiting = set(ranks)
    heard, sent = _Heard(), []
    end, again = time.monotonic() + timeout_s, 0.0
    try:
        while waiting and not give_up() and (now := time.monotonic()) < end:
            if now >= again:
                again = now + _AGAIN_S
                for rank in waiting:
                    with contextlib.suppress(KeyError):  # it has died meanwhile
                        sent += client.send_cells([rank], _NOTHING, {}, heard)
                        answer = client.ping(rank)
                        answer.add_done_callback(lambda _, rank=rank: heard.on_control(rank))
            heard.something.wait(_LOOK_S)
            heard.something.clear()
            waiting -= heard.all()
    finally:
        client.forget(sent)
    return sorted(waiting)


def hear(client: RankClient, ranks: Iterable[int], *, timeout_s: float) -> bool:
    """Wait until output of any of these ranks comes to a client that has just connected; they may be busy.

    Returns:
        Whether it came within `timeout_s` seconds.
    """
    heard, sent = _Heard(), []
    end = time.monotonic() + timeout_s
    try:
        while not heard.output and (now := time.monotonic()) < end:
            for rank in ranks:
                with contextlib.suppress(KeyError):  # it has died meanwhile
                    sent.append(client.ping(rank, handler=heard).msg_id)
            heard.something.wait(min(_AGAIN_S, end - now))
            heard.something.clear()
    finally:
        client.forget(sent)
    return bool(heard.output)
