"""The socket on which the process that uses a cluster answers other programs; its folder is private to the user.

A thread answers, so that it works while a cell runs. It only reads, unless the notebook has allowed more.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.endpoint.operations import OPERATIONS, Operations
from axon_nb.errors import AxonError, CellInterrupt, UsageError
from axon_nb.records.endpoint import EndpointError, ErrorCode
from axon_nb.records.protocol.cluster import AgentEvent, Closed
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

_MAX_REQUEST_BYTES = 16 << 20
_IDLE_TIMEOUT_S = 60.0
_MAX_CONNECTIONS = 16


class Endpoint:
    """Answers the requests of `axon_nb.records.endpoint` until the cluster is stopped, detached or lost.

    Args:
        cluster: The cluster.
        is_shared: Whether other programs may change something: run cells, replace ranks, read and set variables.
    """

    def __init__(self, cluster: Cluster, is_shared: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._is_shared = is_shared
        self._operations = Operations(cluster, is_shared)
        self._path = cluster.connection.run_dir.endpoint_socket
        self._listener = socket.socket(socket.AF_UNIX)
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def start(self) -> None:
        """Listen, in a thread. If that is impossible, as on a full disk, there is no endpoint."""
        try:
            self._path.unlink(missing_ok=True)  # that of a kernel that was killed
            self._listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            self._listener.listen()
        except OSError:
            self._listener.close()
            return
        threading.Thread(target=self._serve, name="axon_nb-endpoint", daemon=True).start()
        self._cluster.connection.agent.on_event(self._on_event)

    def _on_event(self, event: AgentEvent) -> None:
        if isinstance(event, Closed):
            self.close()

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer_all, args=(connection,), name="axon_nb-answer", daemon=True).start()

    def _answer_all(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
                connection.settimeout(_IDLE_TIMEOUT_S)
                while line := lines.readline(_MAX_REQUEST_BYTES):
                    connection.sendall(json.dumps(self.answer(line), default=str).encode() + b"\n")
        finally:
            self._free.release()

    def answer(self, line: bytes) -> dict[str, Any]:
        """Return the reply to one request."""
        try:
            return {"ok": self._perform(line)}
        except EndpointError as error:
            return error.to_json()
        except UsageError as error:
            return EndpointError(ErrorCode.BAD_REQUEST, str(error)).to_json()
        except (AxonError, CellInterrupt) as error:
            return EndpointError(ErrorCode.FAILED, str(error)).to_json()
        except Exception as error:  # the program that asked gets it; the notebook must not notice
            return EndpointError(ErrorCode.FAILED, f"{type(error).__name__}: {error}").to_json()

    def _perform(self, line: bytes) -> Any:
        try:
            request = json.loads(line)
            name, arguments = request["do"], request.get("with", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise EndpointError(ErrorCode.BAD_REQUEST, 'A request must be {"do": NAME, "with": {…}}.') from None
        operation = OPERATIONS.get(name) if isinstance(name, str) else None
        if operation is None or not isinstance(arguments, Mapping):
            raise EndpointError(ErrorCode.BAD_REQUEST, f"There is no request {name!r}; use one of {_names()}.")
        if operation.changes and not self._is_shared():
            raise EndpointError(
                ErrorCode.REFUSED,
                f"{name} is not allowed from outside the notebook. Run `%distributed config share=on` there to allow "
                "it.",
            )
        if operation.needs_idle and (busy := self._cluster.busy):
            raise EndpointError(
                ErrorCode.BUSY, f"A cell is running on {name_ranks(busy)}: try again when it is done, or interrupt it."
            )
        method = getattr(self._operations, name)
        try:
            inspect.signature(method).bind(**arguments)
        except TypeError as error:
            raise EndpointError(ErrorCode.BAD_REQUEST, f"{name}: {error}.") from None
        return method(**arguments)


def _names() -> str:
    return ", ".join(sorted(OPERATIONS))
