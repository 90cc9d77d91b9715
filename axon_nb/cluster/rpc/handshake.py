"""The handshake with registered ranks: requests are repeated until each of their channels has replied.

ZeroMQ drops what is sent to a peer that has not connected yet. An engine connects its channels in the background. The
controller reports it as soon as the first of them, the heartbeat's, is connected; on a busy machine the others follow
later. So the first request may never reach the rank, and its first output may never reach the notebook.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.cells import execute_content

_RESEND_INTERVAL_S = 0.25
_POLL_INTERVAL_S = 0.02
_EMPTY_CELL = execute_content("", silent=True)


class _ChannelAcks:
    """Which ranks have replied on which channel; updated on the client's IO thread."""

    def __init__(self) -> None:
        self.cells: set[int] = set()
        self.output: set[int] = set()
        self.control: set[int] = set()
        self.changed = threading.Event()

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Do nothing: an empty cell has no output."""

    def on_idle(self, rank: int) -> None:
        self.output.add(rank)
        self.changed.set()

    def on_reply(self, rank: int, content: dict[str, Any]) -> None:
        self.cells.add(rank)
        self.changed.set()

    def on_control(self, rank: int) -> None:
        self.control.add(rank)
        self.changed.set()

    def complete(self) -> set[int]:
        return self.cells & self.output & self.control


def handshake(client: RankClient, ranks: Iterable[int], *, timeout_s: float, give_up: Callable[[], bool]) -> list[int]:
    """Send idle ranks empty requests until each has replied on its channels for cells, control and output.

    Args:
        client: The notebook's connection to the controller.
        ranks: Registered ranks that run no cell.
        timeout_s: How long to go on, in seconds.
        give_up: Called every 20 ms; whether to stop early.

    Returns:
        The ranks that have not completed the handshake.
    """
    waiting = set(ranks)
    acks, sent = _ChannelAcks(), []
    end, next_send = time.monotonic() + timeout_s, 0.0
    try:
        while waiting and not give_up() and (now := time.monotonic()) < end:
            if now >= next_send:
                next_send = now + _RESEND_INTERVAL_S
                for rank in waiting:
                    with contextlib.suppress(KeyError):  # it has died
                        sent += client.send_cells([rank], _EMPTY_CELL, {}, acks)
                        reply = client.ping(rank)
                        reply.add_done_callback(lambda _, rank=rank: acks.on_control(rank))
            acks.changed.wait(_POLL_INTERVAL_S)
            acks.changed.clear()
            waiting -= acks.complete()
    finally:
        client.forget(sent)
    return sorted(waiting)


def wait_for_output(client: RankClient, ranks: Iterable[int], *, timeout_s: float) -> bool:
    """Wait until output of any of these ranks, which may be busy, reaches a client that has just connected.

    Returns:
        Whether it did within `timeout_s` seconds.
    """
    acks, sent = _ChannelAcks(), []
    end = time.monotonic() + timeout_s
    try:
        while not acks.output and (now := time.monotonic()) < end:
            for rank in ranks:
                with contextlib.suppress(KeyError):  # it has died
                    sent.append(client.ping(rank, handler=acks).msg_id)
            acks.changed.wait(min(_RESEND_INTERVAL_S, end - now))
            acks.changed.clear()
    finally:
        client.forget(sent)
    return bool(acks.output)
