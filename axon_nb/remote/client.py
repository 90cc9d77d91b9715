"""Requests to the notebook that uses a cluster, from another process of the same user."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from axon_nb.doctor.clusters import FoundCluster, find_clusters
from axon_nb.records.endpoint import EndpointError, ErrorCode

_TIMEOUT_S = 60.0
"""A notebook replies within seconds, unless its kernel is in C code that holds the GIL."""


class NotebookClient:
    """Sends requests to the notebook that uses one cluster; each has a connection of its own.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: FoundCluster) -> None:
        self.name = cluster.name
        self._path = cluster.run_dir.endpoint_socket

    def request(self, operation: str, /, *, timeout_s: float = _TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the reply.

        Args:
            operation: Its name, such as ``status``.
            timeout_s: How long to wait for the reply, in seconds.
            arguments: Its arguments.

        Raises:
            EndpointError: it was refused, it failed, or there was no reply in time.
        """
        request = json.dumps({"do": operation, "with": arguments}).encode() + b"\n"
        deadline = time.monotonic() + timeout_s
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(timeout_s)
                connection.connect(str(self._path))
                connection.sendall(request)
                reply = _read_line(connection, deadline)
        except TimeoutError:
            raise EndpointError(
                ErrorCode.NO_REPLY,
                f"The notebook of {self.name!r} did not reply within {timeout_s:g} s. It may run code that does not "
                "let other threads work; try again, or restart its kernel: the ranks keep running.",
            ) from None
        except OSError:
            raise EndpointError(ErrorCode.NO_CLUSTER, _no_notebook(self.name)) from None
        if not reply:
            raise EndpointError(ErrorCode.NO_CLUSTER, f"The notebook of {self.name!r} closed the connection.")
        answer = json.loads(reply)
        if "error" in answer:
            error = answer["error"]
            raise EndpointError(ErrorCode(error["code"]), error["message"])
        result: dict[str, Any] = answer["ok"]
        return result


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    parts = bytearray()
    while not parts.endswith(b"\n"):
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(1 << 16)
        if not part:
            return b""
        parts += part
    return bytes(parts)


def connect(name: str | None = None) -> NotebookClient:
    """Return a client of the notebook that uses a cluster.

    Args:
        name: The cluster's name, or that of its folder; None: the only one.

    Raises:
        EndpointError: there is no such cluster, no notebook uses it, or there are several.
    """
    living = [cluster for cluster in find_clusters() if cluster.state != "dead"]
    chosen = [cluster for cluster in living if name in (None, cluster.name, cluster.folder)]
    if not chosen:
        which = f"There is no cluster {name!r}" if name is not None else "You have no clusters"
        others = f"; running are {', '.join(cluster.name for cluster in living)}" if living else ""
        raise EndpointError(ErrorCode.NO_CLUSTER, f"{which} on this host{others}.")
    used = [cluster for cluster in chosen if cluster.state != "detached"]
    if len(used or chosen) > 1:
        names = ", ".join(cluster.name for cluster in used or chosen)
        raise EndpointError(ErrorCode.BAD_REQUEST, f"You have several clusters: {names}. Name one.")
    if not used:
        raise EndpointError(ErrorCode.NO_CLUSTER, _no_notebook(chosen[0].name))
    return NotebookClient(used[0])


def _no_notebook(name: str) -> str:
    return (
        f"No notebook uses the cluster {name!r} now, or it has an older axon_nb. Run `%distributed attach {name}` in a "
        "notebook to reconnect."
    )
