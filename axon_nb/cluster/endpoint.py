"""The socket on which this process answers other programs of the same user, such as `axon-nb status`.

Its folder is private to the user. A thread answers, so that it works while a cell runs. Other programs may see a
cluster at any time: that changes no rank and waits for no cell. To run cells they need the notebook's permission.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from axon_nb.cluster.cells.driver import CellHandle
from axon_nb.cluster.commands import described, folded, logs, perform, timeline
from axon_nb.errors import AxonError, CellError, CellInterrupt, ClusterLostError, UsageError
from axon_nb.records.commands import COMMANDS, ClusterCommand, EndpointError, ErrorCode
from axon_nb.records.protocol.agent import AgentEvent, Closed
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

_MAX_REQUEST_BYTES = 16 << 20
_IDLE_TIMEOUT_S = 60.0
_MAX_CONNECTIONS = 16
_MAX_KEPT_CELLS = 32
"""Results of the last cells that are kept."""
_MAX_WAIT_S = 20.0
_MAX_PRINTED = 32_000
"""Characters of one rank's output in one reply; the next one continues there."""


class Endpoint:
    """Answers the requests of `axon_nb.records.commands` until the cluster is stopped, detached or lost.

    Args:
        cluster: The cluster.
        is_shared: Whether other programs may change something: run cells, replace ranks, read and set variables.
    """

    def __init__(self, cluster: Cluster, is_shared: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._is_shared = is_shared
        self._operations = operations_of(cluster, is_shared)
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
        operation = self._operations.get(name) if isinstance(name, str) else None
        if operation is None or not isinstance(arguments, Mapping):
            raise EndpointError(
                ErrorCode.BAD_REQUEST,
                f"There is no request {name!r}; use one of {', '.join(sorted(self._operations))}.",
            )
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
        try:
            inspect.signature(operation.function).bind(**arguments)
        except TypeError as error:
            raise EndpointError(ErrorCode.BAD_REQUEST, f"{name}: {error}.") from None
        return operation.function(**arguments)


class Operation(Struct, frozen=True):
    """A request; its function returns plain JSON values."""

    function: Callable[..., dict[str, Any]]
    changes: bool = False
    """Whether it can change something on the ranks, and so is refused unless the notebook has set ``share=on``."""
    needs_idle: bool = False
    """Whether it is refused while a cell runs."""


def operations_of(cluster: Cluster, is_shared: Callable[[], bool]) -> dict[str, Operation]:
    """Return all requests by name: the commands, and what only programs ask.

    Args:
        cluster: The cluster.
        is_shared: Whether requests that change something are allowed.
    """
    cells = SharedCells(cluster)
    found = {
        name: Operation(_function_of(cluster, name, command), command.changes, command.needs_idle)
        for name, command in COMMANDS.items()
    }
    look = found["status"].function

    def push(values: Mapping[str, Any], ranks: str | None = None) -> dict[str, Any]:
        cluster.push(dict(values), ranks=ranks)
        return {"names": list(values), "text": f"Sent {', '.join(values)}."}

    def pull(expression: str, ranks: str | None = None) -> dict[str, Any]:
        values = cluster.pull(expression, ranks=ranks, numpy=True)
        groups = folded({rank: described(value) for rank, value in values.items()}, "value")
        return {"groups": groups, "text": "\n".join(f"[ranks {each['ranks']}] {each['value']}" for each in groups)}

    def log(run: str | None = None, since: Mapping[str, int] | None = None) -> dict[str, Any]:
        return logs(cluster, run, since or {})

    return found | {
        "status": Operation(lambda: {**look(), "share": is_shared()}),
        "timeline": Operation(lambda limit=20: timeline(cluster, limit)),
        "logs": Operation(log),
        "run": Operation(cells.start, changes=True, needs_idle=True),
        "poll": Operation(cells.poll, changes=True),
        "cancel": Operation(cells.cancel, changes=True),
        "push": Operation(push, changes=True, needs_idle=True),
        "pull": Operation(pull, changes=True, needs_idle=True),
    }


def _function_of(cluster: Cluster, name: str, command: ClusterCommand) -> Callable[..., dict[str, Any]]:
    def ask(**options: Any) -> dict[str, Any]:
        return perform(cluster, name, **(command.defaults | options))

    vars(ask)["__signature__"] = inspect.Signature(command.parameters)
    return ask


class SharedCells:
    """The cells that other programs have started on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count(1)
        self._handles: OrderedDict[str, CellHandle] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, code: str, ranks: str | None = None, timeout: float | None = None) -> dict[str, Any]:
        """Start a cell; return its name. What it prints is not shown in the notebook.

        Args:
            code: Python as in a cell.
            ranks: Which ranks; None: all.
            timeout: Abort it after this many seconds; None: never.
        """
        handle = self._cluster.run_noblock(code, ranks=ranks, timeout=timeout, quiet=True, values=False)
        with self._lock:
            name = f"run-{next(self._numbers)}"
            self._handles[name] = handle
            for old in list(self._handles)[:-_MAX_KEPT_CELLS]:
                if self._handles[old].done():
                    del self._handles[old]
        return {"run": name}

    def poll(self, run: str, since: Mapping[str, int] | None = None, wait_s: float = 0.0) -> dict[str, Any]:
        """Return what a cell has printed, and its result once it is done.

        Args:
            run: Its name.
            since: By rank, how many characters the program already has.
            wait_s: Wait at most this long for its end.
        """
        handle = self._handle(run)
        is_done = handle.wait(max(0.0, min(wait_s, _MAX_WAIT_S))) if wait_s else handle.done()
        known = {int(rank): int(count) for rank, count in (since or {}).items()}
        text, seen, is_cut = {}, {}, False
        for rank, printed in handle.text().items():
            start = known.get(rank, 0)
            text[rank] = printed[start : start + _MAX_PRINTED]
            seen[str(rank)] = start + len(text[rank])
            is_cut = is_cut or seen[str(rank)] < len(printed)
        result = _cell_result(handle) if is_done else None
        output = [group for group in folded(text, "text") if group["text"]]
        return {"run": run, "done": is_done, "output": output, "more": is_cut, "since": seen, "result": result}

    def cancel(self, run: str) -> dict[str, Any]:
        """Interrupt a cell."""
        handle = self._handle(run)
        was_running = not handle.done()
        handle.cancel()
        return {"run": run, "cancelled": was_running}

    def _handle(self, run: str) -> CellHandle:
        with self._lock:
            if run in self._handles:
                return self._handles[run]
            raise EndpointError(ErrorCode.BAD_REQUEST, f"There is no run {run!r}; known are {list(self._handles)}.")


def _cell_result(handle: CellHandle) -> dict[str, Any]:
    try:
        return handle.result().to_dict()
    except (CellError, CellInterrupt) as error:
        return error.to_dict()
    except ClusterLostError as error:
        raise EndpointError(ErrorCode.NO_CLUSTER, str(error)) from None
