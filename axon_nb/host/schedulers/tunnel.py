"""Both ends of a tunnel through which a pod reaches a notebook's host that it cannot connect to.

Kubernetes' API server forwards connections from the notebook to a port of a pod, not the other way. So the notebook's
end keeps some of these waiting. In the pod, `relay` listens on loopback on the same ports as the notebook's host does,
and sends what connects there through one that waits, with its port first.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from axon_nb.errors import StartError
from axon_nb.host.children import set_parent_death_signal

PORT = 29467
"""Where the pod's end waits for forwarded connections: none that a system chooses for others."""
_WAITING = 4
_RETRY_S = 0.5
_ANSWER_S = 10.0
_ACCEPTED = b"+"
_LOOPBACK = "127.0.0.1"


def relay(ports: Collection[int]) -> None:
    """Listen on these ports of loopback, and return in a child, with which this process ends: an agent kills its own.

    Raises:
        StartError: one is in use.
    """
    try:
        listeners = {port: socket.create_server((_LOOPBACK, port), backlog=128) for port in (PORT, *ports)}
    except OSError as error:
        raise StartError(
            f"Cannot listen on the ports of the notebook's host ({error.strerror}): a pod in the network of its node "
            "cannot use the port-forward. Remove `hostNetwork` from the template."
        ) from None
    if not (child := os.fork()):
        set_parent_death_signal(signal.SIGTERM)
        for listener in listeners.values():
            listener.close()
        return
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    waiting: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    for port, listener in listeners.items():
        threading.Thread(target=_accept, args=(listener, port, waiting), daemon=True).start()
    os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def _accept(listener: socket.socket, port: int, waiting: queue.SimpleQueue[socket.socket]) -> None:
    while True:
        connection = listener.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if port == PORT:
            waiting.put(connection)
        else:
            threading.Thread(target=_send_through, args=(connection, port, waiting), daemon=True).start()


def _send_through(connection: socket.socket, port: int, waiting: queue.SimpleQueue[socket.socket]) -> None:
    answer = b""
    while not answer:  # those whose other end is gone give none
        stream = waiting.get()
        with contextlib.suppress(OSError):
            stream.settimeout(_ANSWER_S)
            stream.sendall(port.to_bytes(2, "big"))
            answer = stream.recv(1)
            stream.settimeout(None)
    if answer == _ACCEPTED:
        _join(connection, stream)
    stream.close()
    connection.close()


def keep_waiting(connect: Callable[[], Any], ports: Collection[int]) -> None:
    """Keep connections to the pod's end waiting, in threads, and lead each to the port of this host that it names.

    Args:
        connect: Opens one; returns a socket.
        ports: The ports of loopback that may be named.
    """
    for _ in range(_WAITING):
        threading.Thread(target=_wait, args=(connect, ports), daemon=True).start()


def _wait(connect: Callable[[], Any], ports: Collection[int]) -> None:
    while True:
        named = b""
        with contextlib.suppress(Exception):  # there is none yet, or the API server is not reached
            stream = connect()
            while len(named) < 2 and (data := stream.recv(2 - len(named))):
                named += data
        if len(named) == 2:
            break
        time.sleep(_RETRY_S)
    threading.Thread(target=_wait, args=(connect, ports), daemon=True).start()
    with contextlib.suppress(OSError):
        if (port := int.from_bytes(named, "big")) in ports:
            with socket.create_connection((_LOOPBACK, port)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream.sendall(_ACCEPTED)
                _join(connection, stream)
    stream.close()


def _join(one: Any, other: Any) -> None:
    """Pass on what arrives on either, until one of them ends."""

    def copy(source: Any, target: Any) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    back = threading.Thread(target=copy, args=(other, one), daemon=True)
    back.start()
    copy(one, other)
    back.join()
