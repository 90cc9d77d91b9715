"""Cells, requests and calls to ranks over ipyparallel's channels, and all private hooks into ipyparallel.

Cells are plain `execute_request` messages on ipyparallel's own channels. Unlike in ipyparallel, replies and output of
cells go straight to their handler, without its caches: these grow with every message, and join all output so far into
one string at each chunk. The register lists the hooks as `rpc.client` and `rpc.streams`.

Requests go over the control channel, which replies even if the main thread is stuck. A call runs a function on a rank:
ipyparallel's `apply`, without importing the rank's side here.

The handshake repeats requests until each channel of a rank has replied. ZeroMQ drops what is sent to a peer that has
not connected yet. An engine connects its channels in the background. The controller reports it as soon as the first of
them, the heartbeat's, is connected; on a busy machine the others follow later. So the first request may never reach
the rank, and its first output may never reach the notebook.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import ipyparallel as ipp
import zmq
from ipyparallel.serialize import serialize_object
from jupyter_client.session import DELIM

from axon_nb.errors import AxonError, StartError
from axon_nb.records.protocol import wire
from axon_nb.records.protocol.cells import execute_content
from axon_nb.records.protocol.inspection import TelemetryEvent, WaitsRequest
from axon_nb.records.protocol.recovery import DirectRequest
from axon_nb.records.ranks import name_ranks, ranks_by
from axon_nb.records.waits import RankWaits

R = TypeVar("R")
_QUERY_INTERVAL_S = 0.5
_ENGINE = re.compile(rb"engine\.(\d+)\.")
"""The topic of an engine's output."""
_TELEMETRY = wire.message_type(TelemetryEvent)
_serializers_lock = threading.Lock()
"""ipyparallel completes its table of serializers on first use, which fails if two threads do it at once."""
_FORGET_TIMEOUT_S = 2.0
_MAX_PATH = 100
"""Longest path of a Unix socket, nearly."""
_GREETING_PARTS = 2
"""An engine's identity, and an empty part."""
_COPIED_PARTS = 7
"""Of a message: identity, delimiter, signature, and the four that every message has; buffers follow."""
_RECEIVED_AT_ONCE = 64
"""Messages, before the loop's other callbacks have a turn."""
_NO_WAIT, _MORE, _HAS_MORE, _EVENTS = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.RCVMORE), int(zmq.EVENTS)
_CAN_RECEIVE = int(zmq.POLLIN)
_JSON = ("json", "orjson")
"""What Jupyter's sessions call it."""
R_co = TypeVar("R_co", covariant=True)
_RESEND_INTERVAL_S = 0.25
_ACK_POLL_INTERVAL_S = 0.02
_EMPTY_CELL = execute_content("", silent=True)


class CellHandler(Protocol):
    """Processes the messages of one cell; called on the client's IO thread."""

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Process a message of the output channel."""

    def on_idle(self, rank: int) -> None:
        """Record that the rank has sent all output of the cell."""

    def on_reply(self, rank: int, content: dict[str, Any]) -> None:
        """Process the rank's reply: it has finished the cell."""


class DirectSocket:
    """A router socket on an IO loop, and of use on its thread alone.

    Not a ZMQStream: its bookkeeping takes more time than a small message.
    """

    def __init__(self, router: Any, io_loop: Any, dispatch: Callable[[list[Any]], None]) -> None:
        self._router, self._io_loop, self._dispatch = router, io_loop, dispatch
        io_loop.add_handler(router.fileno(), self._on_event, io_loop.READ)

    def send_multipart(self, parts: list[Any], *, copy: bool = True) -> None:
        """Send a message; it is dropped if the peer is gone."""
        for part in parts[:-1]:
            self._router.send(part, _MORE, copy=copy)
        self._router.send(parts[-1], copy=copy)
        if self._router.get(_EVENTS) & _CAN_RECEIVE:  # the file descriptor says so once, and sending may have read it
            self._io_loop.add_callback(self._on_event)

    def _on_event(self, *event: Any) -> None:
        for _ in range(_RECEIVED_AT_ONCE):
            if self._router.closed or not self._router.get(_EVENTS) & _CAN_RECEIVE:
                return
            try:
                self._dispatch(self._receive())
            except BaseException:
                self._io_loop.add_callback(self._on_event)
                raise
        self._io_loop.add_callback(self._on_event)

    def _receive(self) -> list[Any]:
        receive, get = self._router.recv, self._router.get
        parts = [receive(_NO_WAIT)]
        while get(_HAS_MORE):
            parts.append(receive(copy=len(parts) < _COPIED_PARTS))
        return parts

    def close(self) -> None:
        """Close the socket; what has not been sent is dropped."""
        if not self._router.closed:
            self._io_loop.remove_handler(self._router.fileno())
            self._router.close(linger=0)


class RankClient(ipp.Client):
    """An ipyparallel client whose engine ids are ranks."""

    log = logging.Logger("axon_nb.messages", logging.CRITICAL)  # noqa: LOG001 - one that nobody configures
    """ipyparallel reports messages that are not signed here, and has no such attribute; strangers must not print."""

    def __init__(self, connection_file: Path, **kwargs: Any) -> None:
        self._cells: dict[str, tuple[int, CellHandler]] = {}
        self._on_telemetry: Callable[[TelemetryEvent], None] | None = None
        self._on_output: Callable[[int, str, dict[str, Any]], None] = lambda rank, msg_type, content: None
        self._direct_socket: DirectSocket | None = None
        """Reaches the ranks of this host without the controller; None: only through it."""
        self._direct: set[bytes] = set()
        """The engines that are connected to it."""
        self._registered = threading.Condition()
        self._queried_at = 0.0
        super().__init__(str(connection_file), **kwargs)
        if self.session.unpacker in _JSON:
            self.session.unpack = wire.unpack
        self._queue_handlers["execute_reply"] = self._on_execute_reply
        self._registration_callbacks.append(self._notify_registered)

    def activate(self, targets: Any = "all", suffix: str = "") -> Any:
        """Do nothing: our clusters must not add %px to the user's notebook unasked."""

    def _notify_registered(self, event: dict[str, Any]) -> None:
        with self._registered:
            self._registered.notify_all()

    @property
    def registered(self) -> list[int]:
        """The engine ids that are registered now, without querying the controller."""
        return sorted(self._engines)

    def wait_registered(self, ranks: Iterable[int], timeout_s: float) -> bool:
        """Wait until engines with these ids are registered, at most `timeout_s` seconds.

        The controller is queried, too: what it sent before its connection to this client was up is lost.
        """
        wanted, end = set(ranks), time.monotonic() + timeout_s
        while not wanted <= set(self._engines):
            if (left := end - time.monotonic()) <= 0:
                return False
            self._query_registered()
            with self._registered:
                self._registered.wait_for(lambda: wanted <= set(self._engines), min(_QUERY_INTERVAL_S, left))
        return True

    def _query_registered(self) -> None:
        if time.monotonic() - self._queried_at < _QUERY_INTERVAL_S:
            return
        self._queried_at = time.monotonic()

        def update(reply: Any) -> None:
            registered = {int(key): ident for key, ident in reply.result()["content"]["engines"].items()}
            # An engine that is already known may have been replaced since the controller replied.
            self._update_engines({rank: ident for rank, ident in registered.items() if rank not in self._engines})
            self._notify_registered({})

        self._send(self._query_stream, "connection_request").add_done_callback(update)

    def wait_unregistered(self, ranks: Iterable[int], timeout_s: float) -> bool:
        """Wait until no engine with one of these ids is registered, at most `timeout_s` seconds."""
        unwanted = set(ranks)
        with self._registered:
            return self._registered.wait_for(lambda: not unwanted & set(self._engines), timeout_s)

    def send_cells(
        self, ranks: Iterable[int], content: dict[str, Any], metadata: dict[str, Any], handler: CellHandler
    ) -> list[str]:
        """Send one `execute_request` to each rank; return the message ids, for `forget`."""
        pack, ids, messages = self.session.pack, [], []
        packed, packed_metadata = pack(content), pack(metadata)  # once for all ranks
        header = self.session.msg_header("execute_request")
        for rank in ranks:
            header["msg_id"] = self.session.msg_id
            parts = [pack(header), b"{}", packed_metadata, packed]
            messages.append([self._engines[rank].encode(), DELIM, self.session.sign(parts), *parts])
            ids.append(header["msg_id"])
            self._cells[header["msg_id"]] = (rank, handler)

        def send() -> None:
            for message in messages:
                self._stream_to(message[0]).send_multipart(message)

        self._io_loop.add_callback(send)
        return ids

    def connect_directly(self, path: Path, host: str, ranks: Iterable[int]) -> None:
        """Have the ranks of this host take cells and calls from a socket of ours; until then, nothing changes.

        Each message to the controller costs it as much as the rank.

        Args:
            path: The socket, in a private folder.
            host: Name of this host.
            ranks: The ranks to ask; those on other hosts decline.
        """
        if len(str(path)) > _MAX_PATH:
            return

        def listen() -> None:
            if self._direct_socket is None:
                router = self._context.socket(zmq.ROUTER)
                router.set_hwm(0)
                router.bind(f"ipc://{path}")
                path.chmod(0o600)
                self._direct_socket = DirectSocket(router, self._io_loop, self._dispatch_direct)
            for rank in ranks:
                with contextlib.suppress(KeyError):  # it has just died
                    self.request(rank, DirectRequest(str(path), host, self._engines[rank]))

        self._io_loop.add_callback(listen)

    def _stream_to(self, ident: bytes) -> Any:
        return self._direct_socket if ident in self._direct else self._mux_stream

    def _dispatch_direct(self, parts: list[Any]) -> None:
        if len(parts) == _GREETING_PARTS:  # from an engine that is now connected
            self._direct.add(parts[0])
            return
        try:
            message = self.session.deserialize(self.session.feed_identities(parts)[1])
        except Exception:  # as ipyparallel does with what is not signed
            self.log.exception("Invalid message")
            return
        self._queue_handlers[message["msg_type"]](message)

    def _send(self, socket: Any, *args: Any, ident: Any = None, **kwargs: Any) -> Any:
        # Calls take the same way as cells, or they would overtake each other.
        stream = self._stream_to(ident) if socket is self._mux_stream else socket
        return super()._send(stream, *args, ident=ident, **kwargs)

    def close(self, linger: int | None = None) -> None:
        """Close all connections."""
        if self._direct_socket is not None:
            self._io_loop.add_callback(self._direct_socket.close)
        super().close(linger=linger)

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop whatever else arrives for these messages."""
        for message_id in message_ids:
            self._cells.pop(message_id, None)

    def request(self, rank: int, request: wire.Request[R]) -> Answer[R]:
        """Send a request on a rank's control channel, which replies even if the main thread is stuck.

        Raises:
            KeyError: the rank is not registered.
        """
        kind = type(request)
        return Answer(kind, self._send_control(rank, wire.message_type(kind), wire.pack(wire.encode(request))))

    def _send_control(self, rank: int, msg_type: str, content: dict[str, Any] | bytes) -> Any:
        return self._send(self._control_stream, msg_type, content=content, ident=self._engines[rank].encode())

    def ping(self, rank: int, *, handler: CellHandler | None = None) -> Any:
        """Send an empty request on a rank's control channel.

        Args:
            rank: The rank.
            handler: Notified once the rank's output so far has arrived, unless `forget` is called; may be None.

        Returns:
            A future of Jupyter's reply.

        Raises:
            KeyError: the rank is not registered.
        """
        future = self._send_control(rank, "kernel_info_request", {})
        if handler is not None:
            self._cells[future.msg_id] = (rank, handler)
        return future

    def on_telemetry(self, handler: Callable[[TelemetryEvent], None] | None) -> None:
        """Call `handler`, on the IO thread, with each telemetry message."""
        self._on_telemetry = handler

    def on_output(self, handler: Callable[[int, str, dict[str, Any]], None]) -> None:
        """Call `handler`, on the IO thread, with rank, type and content of output that belongs to no running cell."""
        self._on_output = handler

    def on_registration(self, handler: Callable[[dict[str, Any]], None]) -> None:
        """Call `handler`, on the IO thread, when an engine registers or unregisters."""
        self._registration_callbacks.append(handler)

    def unregister(self, rank: int) -> None:
        """Have the controller forget this engine, which frees its id, also if it died before it had registered."""
        self._send(self._query_stream, "unregistration_request", content={"id": rank})

    def _on_execute_reply(self, message: dict[str, Any]) -> None:
        entry = self._cells.get(message["parent_header"].get("msg_id"))
        if entry is None:
            # A cell that we no longer wait for; ipyparallel would print a line about it.
            if message["parent_header"].get("msg_id") in self.outstanding:
                self._handle_execute_reply(message)
            return
        rank, handler = entry
        handler.on_reply(rank, message["content"])

    def _dispatch_iopub(self, parts: list[Any]) -> None:
        try:
            idents, frames = self.session.feed_identities(parts, copy=False)
            message = self.session.deserialize(frames, content=True, copy=False)
        except Exception:  # not ours: anybody can send to the port of a controller for several hosts
            return
        msg_type = message["header"]["msg_type"]
        parent = message["parent_header"] or {}
        entry = self._cells.get(parent.get("msg_id", ""))
        # Not what libraries print while an engine starts; output of an earlier client's cells is fetched from a log.
        is_from_cell = parent.get("msg_type") == "execute_request" and parent.get("session") == self.session.session
        if entry is not None:
            rank, handler = entry
            if msg_type == "status":
                if message["content"]["execution_state"] == "idle":
                    handler.on_idle(rank)
            else:
                handler.on_output(rank, msg_type, message["content"], message["metadata"])
        elif msg_type == _TELEMETRY:
            if self._on_telemetry is not None:
                self._on_telemetry(wire.decode(TelemetryEvent, message["content"]))
        elif (match := _ENGINE.match(idents[0] if idents else b"")) and is_from_cell:
            self._on_output(int(match.group(1)), msg_type, message["content"])
        else:
            ipp.Client._dispatch_iopub.__wrapped__(self, message)


def connect(connection_file: Path, *, timeout_s: float, alive: Callable[[], bool]) -> RankClient:
    """Wait for the controller's connection file and connect.

    Args:
        connection_file: The controller's file for clients.
        timeout_s: How long to wait, in seconds.
        alive: Whether the host agent is alive, which runs the controller.

    Raises:
        StartError: the controller exited, or did not start within `timeout_s` seconds.
    """
    end = time.monotonic() + timeout_s
    with _serializers_lock:  # imports NumPy, while the controller starts
        serialize_object(None)
    # The engines' file is written last: once it exists, the clients' file is complete.
    last = connection_file.with_name(connection_file.name.replace("client", "engine"))
    while not (last.exists() and last.stat().st_size):
        if not alive():
            raise StartError("The host agent is gone. Run `%distributed start` to start a new cluster.")
        if time.monotonic() > end:
            raise StartError(
                f"The ipyparallel controller did not start within {timeout_s:.0f} s: no {connection_file}."
            )
        time.sleep(0.005)
    return RankClient(connection_file)


def forget_engine(client_file: Path, rank: int) -> None:
    """Have the controller forget the engine `rank`; if that fails, it misses its heartbeat after half a minute.

    Args:
        client_file: The controller's connection file for clients.
        rank: The engine's id.
    """
    with contextlib.suppress(Exception):  # the controller may be gone as well
        client = RankClient(client_file, timeout=_FORGET_TIMEOUT_S)
        try:
            client.unregister(rank)
            client.wait_unregistered([rank], _FORGET_TIMEOUT_S)
        finally:
            client.close(linger=0)


class RefusedError(AxonError):
    """The rank refused the request; the message says why."""


class Answer(Generic[R_co]):
    """A future of the reply to one request.

    Args:
        kind: The request's class.
        future: ipyparallel's future of the whole message.
    """

    def __init__(self, kind: type[wire.Request[R_co]], future: Any) -> None:
        self._kind = kind
        self._future = future

    @property
    def msg_id(self) -> str:
        """The request's message id, for `RankClient.forget`."""
        return str(self._future.msg_id)

    def done(self) -> bool:
        """Whether the answer has arrived."""
        return bool(self._future.done())

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds; return whether the answer has arrived."""
        return bool(self._future.wait(timeout_s))

    def result(self, timeout_s: float | None = None) -> R_co:
        """Wait for the reply, at most `timeout_s` seconds.

        Raises:
            RefusedError: the rank refused the request.
            ProtocolError: the rank failed to answer, or a field of the reply is missing or invalid.
            TimeoutError: there is no answer in time.
        """
        message = self._future.result(timeout_s)
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == wire.REFUSAL:
            raise RefusedError(content["reason"])
        if kind != wire.REPLY:
            reason = content.get("reason", f"it sent {kind}")
            raise wire.ProtocolError(f"{self._kind.__name__} failed on the rank: {reason}")
        return wire.decode_reply(self._kind, content)

    def reply(self) -> R_co | None:
        """Return the reply; None if it has not arrived, or the rank refused or failed."""
        try:
            return self.result() if self.done() else None
        except (RefusedError, wire.ProtocolError):
            return None

    def add_done_callback(self, callback: Callable[[Answer[R_co]], None]) -> None:
        """Call `callback` with this answer once it has arrived: on the client's thread, or at once."""
        self._future.add_done_callback(lambda _: callback(self))


class Replies(dict[int, R]):
    """Replies by rank, without the ranks that refused the request, failed or did not reply in time."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[int, str] = {}
        """By rank that refused the request, the reason."""
        self.failed: dict[int, str] = {}
        """By rank that failed to answer the request, the error."""

    def missing(self, ranks: Iterable[int]) -> list[str]:
        """Return a sentence for each reason for which some of `ranks` neither replied nor refused."""
        silent_ranks = [rank for rank in ranks if rank not in self and rank not in self.refused]
        return [
            f"{name_ranks(silent).capitalize()} did not reply{': ' if reason else ''}{reason.rstrip('.')}."
            for reason, silent in ranks_by((self.failed.get(rank, ""), rank) for rank in silent_ranks).items()
        ]


def request_all(client: RankClient, ranks: Iterable[int], request: wire.Request[R], *, timeout_s: float) -> Replies[R]:
    """Send one control request to all `ranks`; return the replies of those that reply within `timeout_s` seconds."""
    return request_each(client, dict.fromkeys(ranks, request), timeout_s=timeout_s)


def request_each(client: RankClient, requests: Mapping[int, wire.Request[R]], *, timeout_s: float) -> Replies[R]:
    """Send each rank its own control request; return the replies as `request_all` does."""
    answers: dict[int, Answer[R]] = {}
    for rank, request in requests.items():
        with contextlib.suppress(KeyError):  # unregistered meanwhile
            answers[rank] = client.request(rank, request)
    end = time.monotonic() + timeout_s
    replies: Replies[R] = Replies()
    for rank, answer in answers.items():
        if answer.wait(max(0.0, end - time.monotonic())):
            try:
                replies[rank] = answer.result()
            except RefusedError as refusal:
                replies.refused[rank] = str(refusal)
            except wire.ProtocolError as error:
                replies.failed[rank] = str(error)
    return replies


def request_waits(client: RankClient, ranks: Iterable[int], *, timeout_s: float = 1.0) -> dict[int, RankWaits]:
    """Return what each rank waits in; ranks that do not reply within `timeout_s` seconds are left out."""
    replies = request_all(client, ranks, WaitsRequest(), timeout_s=timeout_s)
    return {rank: reply.waits for rank, reply in replies.items()}


def call(client: RankClient, rank: int, rank_call: wire.RankCall[R]) -> Future[R]:
    """Make a call on one rank once its main thread is free; return a future of the result."""
    result: Future[Any] = client.direct_view(rank).apply_async(
        wire.perform, type(rank_call), wire.arguments_of(rank_call)
    )
    return result


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
            acks.changed.wait(_ACK_POLL_INTERVAL_S)
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
