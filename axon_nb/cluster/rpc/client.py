"""The ipyparallel client that cells travel through, and all private hooks into ipyparallel.

Cells are plain `execute_request` messages on ipyparallel's own channels. What is ours: replies and output of cells go
straight to their handler, without ipyparallel's caches (which grow with every message and join all output so far into
one string at each chunk). `missing()` names what a newer ipyparallel no longer has; a test fails when it does.

Telling ipyparallel's controller that an engine is gone: by itself it misses one after half a minute.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ipyparallel as ipp

from axon_nb.cluster.rpc.answers import Answer
from axon_nb.errors import StartError
from axon_nb.records.protocol.inspection import TelemetryEvent
from axon_nb.records.protocol.messages import Request, message_type
from axon_nb.records.protocol.wire import decode, encode

__all__ = ["CellHandler", "RankClient", "connect", "missing", "tell_controller"]

R = TypeVar("R")

_NEEDED = ("_dispatch_iopub", "_handle_execute_reply", "_send", "_update_engines")
_ASK_S = 0.5
_TELEMETRY = message_type(TelemetryEvent)


def missing() -> list[str]:
    """Names of the hooks that this ipyparallel does not have."""
    absent = [name for name in _NEEDED if not hasattr(ipp.Client, name)]
    if not hasattr(getattr(ipp.Client, "_dispatch_iopub", None), "__wrapped__"):
        absent.append("_dispatch_iopub.__wrapped__")
    return absent


class CellHandler(Protocol):
    """Takes what comes back from one cell; called on the client's IO thread."""

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """A message of the output channel."""

    def on_idle(self, rank: int) -> None:
        """The rank has sent all output of the cell."""

    def on_reply(self, rank: int, content: dict[str, Any]) -> None:
        """The rank has ended the cell."""


class RankClient(ipp.Client):
    """An ipyparallel client whose engine ids are ranks."""

    def __init__(self, connection_file: Path, **kwargs: Any) -> None:
        self._cells: dict[str, tuple[int, CellHandler]] = {}
        self._on_telemetry: Callable[[TelemetryEvent], None] | None = None
        self._registered = threading.Condition()
        self._asked_at = 0.0
        super().__init__(str(connection_file), **kwargs)
        self._queue_handlers["execute_reply"] = self._on_execute_reply
        self._registration_callbacks.append(self._notify_registered)

    def activate(self, targets: Any = "all", suffix: str = "") -> Any:
        """Nothing: a cluster of ours must not put %px into the user's notebook by itself."""

    def _notify_registered(self, event: dict[str, Any]) -> None:
        with self._registered:
            self._registered.notify_all()

    @property
    def registered(self) -> list[int]:
        """The engine ids that are registered now, without asking the controller."""
        return sorted(self._engines)

    def wait_registered(self, ranks: Iterable[int], timeout_s: float) -> bool:
        """Wait until engines with these ids are registered, at most `timeout_s` seconds.

        The controller is asked, too: what it told before its connection to this client was up is lost.
        """
        wanted, end = set(ranks), time.monotonic() + timeout_s
        while not wanted <= set(self._engines):
            if (left := end - time.monotonic()) <= 0:
                return False
            self._ask_registered()
            with self._registered:
                self._registered.wait_for(lambda: wanted <= set(self._engines), min(_ASK_S, left))
        return True

    def _ask_registered(self) -> None:
        if time.monotonic() - self._asked_at < _ASK_S:
            return
        self._asked_at = time.monotonic()

        def take(answer: Any) -> None:
            there = {int(key): ident for key, ident in answer.result()["content"]["engines"].items()}
            # One that is known already may have been replaced since this was said.
            self._update_engines({rank: ident for rank, ident in there.items() if rank not in self._engines})
            self._notify_registered({})

        self._send(self._query_stream, "connection_request").add_done_callback(take)

    def wait_unregistered(self, ranks: Iterable[int], timeout_s: float) -> bool:
        """Wait until no engine with one of these ids is registered, at most `timeout_s` seconds."""
        unwanted = set(ranks)
        with self._registered:
            return self._registered.wait_for(lambda: not unwanted & set(self._engines), timeout_s)

    def send_cells(
        self, ranks: Iterable[int], content: dict[str, Any], metadata: dict[str, Any], handler: CellHandler
    ) -> list[str]:
        """Send one `execute_request` to each rank; returns the message ids, for `forget`."""
        messages = []
        for rank in ranks:
            message = self.session.msg("execute_request", content=content, metadata=metadata)
            self._cells[message["header"]["msg_id"]] = (rank, handler)
            messages.append((self._engines[rank].encode(), message))

        def send() -> None:
            for ident, message in messages:
                self.session.send(self._mux_stream, message, ident=ident)

        self._io_loop.add_callback(send)
        return [message["header"]["msg_id"] for _, message in messages]

    def forget(self, message_ids: Iterable[str]) -> None:
        """What still comes of these messages is dropped."""
        for message_id in message_ids:
            self._cells.pop(message_id, None)

    def request(self, rank: int, request: Request[R]) -> Answer[R]:
        """Ask a rank on its control channel, which answers while the main thread is stuck.

        Raises:
            KeyError: no engine with this id is registered.
        """
        kind = type(request)
        return Answer(kind, self._ask(rank, message_type(kind), encode(request)))

    def _ask(self, rank: int, msg_type: str, content: dict[str, Any]) -> Any:
        return self._send(self._control_stream, msg_type, content=content, ident=self._engines[rank].encode())

    def ping(self, rank: int, *, handler: CellHandler | None = None) -> Any:
        """Ask a rank for nothing, on its control channel; returns a future of Jupyter's reply.

        With a `handler`, that is told when the rank's output so far has come; until `forget` is called.

        Raises:
            KeyError: no engine with this id is registered.
        """
        future = self._ask(rank, "kernel_info_request", {})
        if handler is not None:
            self._cells[future.msg_id] = (rank, handler)
        return future

    def on_telemetry(self, handler: Callable[[TelemetryEvent], None] | None) -> None:
        """Have `handler` called, on the IO thread, with each telemetry message."""
        self._on_telemetry = handler

    def on_registration(self, handler: Callable[[dict[str, Any]], None]) -> None:
        """Have `handler` called, on the IO thread, when an engine comes or goes."""
        self._registration_callbacks.append(handler)

    def unregister(self, rank: int) -> None:
        """Tell the controller that this engine is gone, so that its id is free again; nothing if it knows."""
        if rank not in self._engines:
            return
        self._send(self._query_stream, "unregistration_request", content={"id": rank})

    def _on_execute_reply(self, message: dict[str, Any]) -> None:
        entry = self._cells.get(message["parent_header"].get("msg_id"))
        if entry is None:
            # A cell that was given up; ipyparallel would print a line about it.
            if message["parent_header"].get("msg_id") in self.outstanding:
                self._handle_execute_reply(message)
            return
        rank, handler = entry
        handler.on_reply(rank, message["content"])

    def _dispatch_iopub(self, parts: list[Any]) -> None:
        _, frames = self.session.feed_identities(parts, copy=False)
        try:
            message = self.session.deserialize(frames, content=True, copy=False)
        except Exception:
            self.log.error("Invalid output message", exc_info=True)
            return
        msg_type = message["header"]["msg_type"]
        entry = self._cells.get((message["parent_header"] or {}).get("msg_id", ""))
        if entry is not None:
            rank, handler = entry
            if msg_type == "status":
                if message["content"]["execution_state"] == "idle":
                    handler.on_idle(rank)
            else:
                handler.on_output(rank, msg_type, message["content"], message["metadata"])
        elif msg_type == _TELEMETRY:
            if self._on_telemetry is not None:
                self._on_telemetry(decode(TelemetryEvent, message["content"]))
        else:
            ipp.Client._dispatch_iopub.__wrapped__(self, message)


def connect(connection_file: Path, *, timeout_s: float, alive: Callable[[], bool]) -> RankClient:
    """Wait for the controller's connection file and connect.

    Raises:
        StartError: the controller ended, or did not come up in `timeout_s` seconds.
    """
    end = time.monotonic() + timeout_s
    # The engines' file is written last: when it is there, the clients' one is complete.
    last = connection_file.with_name(connection_file.name.replace("client", "engine"))
    while not (last.exists() and last.stat().st_size):
        if not alive():
            raise StartError("The host agent is gone: `%distributed start` starts a new cluster.")
        if time.monotonic() > end:
            raise StartError(
                f"The ipyparallel controller did not come up within {timeout_s:.0f} s: no {connection_file}."
            )
        time.sleep(0.005)
    return RankClient(connection_file)


_LIMIT_S = 2.0


def tell_controller(client_file: Path, rank: int) -> None:
    """Have the controller forget the engine `rank`; where that fails it misses the engine's heartbeat after a while.

    Args:
        client_file: The controller's connection file for clients.
        rank: The engine's id.
    """
    with contextlib.suppress(Exception):  # the controller may be gone as well
        client = RankClient(client_file, timeout=_LIMIT_S)
        try:
            client.unregister(rank)
            client.wait_unregistered([rank], _LIMIT_S)
        finally:
            client.close(linger=0)
