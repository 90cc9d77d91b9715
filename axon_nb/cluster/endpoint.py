"""The socket on which this process answers other programs of the same user, such as `axon-nb status`.

Its folder is private to the user. A thread answers, so that it works while a cell runs. Other programs may see a
cluster at any time: that changes no rank and waits for no cell. To run cells they need the notebook's permission.
Values of ranks become plain JSON: ranks with the same value share an entry, and large values are described.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.cells.driver import CellHandle
from axon_nb.cluster.inspection.status import cluster_card, paused_ranks, request_states
from axon_nb.cluster.inspection.variables import PREDEFINED, difference_frame, summary_of, variables_frame
from axon_nb.cluster.rpc import Replies, request_all, request_each
from axon_nb.errors import AxonError, CellError, CellInterrupt, ClusterLostError, UsageError
from axon_nb.records.endpoint import EndpointError, ErrorCode
from axon_nb.records.protocol.agent import AgentEvent, Closed
from axon_nb.records.protocol.cells import CellReport, CellsRequest, NamesRequest
from axon_nb.records.protocol.inspection import WaitsReply, WaitsRequest
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.waits import describe_silent_ranks, describe_slow_ranks, explain_deadlock, missing_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.cluster import Cluster

_MAX_REQUEST_BYTES = 16 << 20
_IDLE_TIMEOUT_S = 60.0
_MAX_CONNECTIONS = 16
_MAX_KEPT_CELLS = 32
"""Results of the last cells that are kept."""
_MAX_WAIT_S = 20.0
_MAX_PRINTED = 32_000
"""Characters of one rank's output in one reply; the next one continues there."""
_REPLY_TIMEOUT_S = 2.0
_WAITING_AFTER_S = 0.5
_SECOND_LOOK_S = 0.3
"""A deadlock is proven if two observations this far apart show the same calls."""
_MODULE = "builtins.module"
_MAX_LOG_BYTES = 8192
_MAX_ELEMENTS = 256
_MAX_VALUE_TEXT = 4000


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


@dataclass(frozen=True, slots=True)
class Operation:
    """The conditions of one request."""

    changes: bool = False
    """Whether it can change something on the ranks, and so is refused unless the notebook has set ``share=on``."""
    needs_idle: bool = False
    """Whether it is refused while a cell runs."""


OPERATIONS: Mapping[str, Operation] = {
    "status": Operation(),
    "stacks": Operation(),
    "explain": Operation(),
    "variables": Operation(),
    "difference": Operation(needs_idle=True),
    "timeline": Operation(),
    "logs": Operation(),
    "interrupt": Operation(),
    "run": Operation(changes=True, needs_idle=True),
    "poll": Operation(changes=True),
    "cancel": Operation(changes=True),
    "repair": Operation(changes=True, needs_idle=True),
    "push": Operation(changes=True, needs_idle=True),
    "pull": Operation(changes=True, needs_idle=True),
}


class Operations:
    """Performs requests; each method is one, and returns plain JSON values.

    Args:
        cluster: The cluster.
        is_shared: Whether requests that change something are allowed.
    """

    def __init__(self, cluster: Cluster, is_shared: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._is_shared = is_shared
        self._cells = SharedCells(cluster)
        self.run = self._cells.start
        self.poll = self._cells.poll
        self.cancel = self._cells.cancel

    def status(self) -> dict[str, Any]:
        """Return the state of each rank, which cell runs, and the result of the last one."""
        return {**status(self._cluster), "share": self._is_shared()}

    def stacks(self, ranks: str | None = None) -> dict[str, Any]:
        """Return where each rank is."""
        return stacks(self._cluster, ranks)

    def explain(self) -> dict[str, Any]:
        """Return which rank the others wait for, and why."""
        return explain(self._cluster)

    def variables(self) -> dict[str, Any]:
        """Return all variables and whether ranks agree; while a cell runs, names and types."""
        return variables(self._cluster)

    def difference(self, name: str, from_rank: int = 0) -> dict[str, Any]:
        """Return where a variable differs between ranks."""
        return difference(self._cluster, name, from_rank)

    def timeline(self, limit: int = 20) -> dict[str, Any]:
        """Return where the recorded time went, by call."""
        return timeline(self._cluster, limit)

    def logs(self, run: str | None = None, since: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return what the ranks printed in their last cell, or in cell `run` after the messages `since`."""
        return logs(self._cluster, run, since or {})

    def interrupt(self) -> dict[str, Any]:
        """Interrupt all running cells, as the notebook's stop button does."""
        ranks = format_ranks(self._cluster.cancel())
        text = f"Interrupted the cell on ranks {ranks}." if ranks else "No cell is running."
        return {"ranks": ranks, "text": text}

    def repair(self, ranks: str | None = None, from_rank: int | None = None) -> dict[str, Any]:
        """Replace dead ranks, and live ones that are named."""
        return {"text": str(self._cluster.repair(ranks, from_rank=from_rank))}

    def push(self, values: Mapping[str, Any], ranks: str | None = None) -> dict[str, Any]:
        """Set variables on ranks."""
        self._cluster.push(dict(values), ranks=ranks)
        return {"names": list(values), "text": f"Sent {', '.join(values)}."}

    def pull(self, expression: str, ranks: str | None = None) -> dict[str, Any]:
        """Evaluate a name or an expression on ranks; large values are described."""
        values = self._cluster.pull(expression, ranks=ranks, numpy=True)
        groups = folded({rank: described(value) for rank, value in values.items()}, "value")
        return {"groups": groups, "text": "\n".join(f"[ranks {each['ranks']}] {each['value']}" for each in groups)}


class SharedCells:
    """The cells that other programs have started on one cluster.

    Args:
        cluster: The cluster.
    """

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


def status(cluster: Cluster) -> dict[str, Any]:
    """Return the state of each rank, which ranks are busy, and the result of the last cell."""
    info = cluster.info()
    return {
        "name": info.name,
        "backend": info.backend,
        "engines": info.engines,
        "num_ranks": info.num_ranks,
        "running": info.running,
        "busy": format_ranks(cluster.busy),
        "dead": format_ranks(cluster.health.dead),
        "slowed": info.slowed,
        "owner_pid": os.getpid(),
        "ranks": [
            {
                "rank": row.rank,
                "host": row.host,
                "pid": row.pid,
                "device": row.device,
                "state": row.state,
                "memory_bytes": row.rss_bytes,
                "device_bytes": row.device_bytes,
                "cell": row.cell,
            }
            for row in info.ranks
        ],
        "mesh": None if info.mesh is None else str(info.mesh),
        "last_result": cluster.cells.last_record,
        "text": cluster_card(info)["text/plain"],
    }


def stacks(cluster: Cluster, ranks: str | None = None) -> dict[str, Any]:
    """Return where each rank is; ranks at the same place share an entry."""
    each = cluster.stacks(ranks)
    by_rank = {
        rank: {
            "state": stack.state,
            "cell": stack.cell,
            "frames": [{"place": frame.place, "code": frame.code} for frame in stack.frames],
        }
        for rank, stack in each.items()
    }
    groups = [{"ranks": entry["ranks"], **entry["stack"]} for entry in folded(by_rank, "stack")]
    return {"groups": groups, "text": str(each)}


def explain(cluster: Cluster) -> dict[str, Any]:
    """Return the verdict on the running cell: which rank the others wait for, or the deadlock; and the last result.

    ``kind`` is ``idle``, ``running`` (nobody waits for long), ``slow``, ``paused`` (at a breakpoint), ``silent`` (a
    rank does not reply), ``deadlock`` or ``dead``.
    """
    last, dead = cluster.cells.last_record, dict(cluster.health.dead)
    if not cluster.busy:
        kind = "dead" if dead else "idle"
        verdict = "; ".join(f"rank {rank} {why}" for rank, why in dead.items()) or "No cell is running."
        return _explained(kind, verdict, waited_for=list(dead), last=last)
    replies = _waits(cluster)
    waits = {rank: reply.waits for rank, reply in replies.items()}
    silent = [rank for rank in cluster.state.live_ranks if rank not in replies]
    if silent:
        peers = {rank: reply.peers for rank, reply in replies.items()}
        text = describe_silent_ranks(waits, peers, silent, _WAITING_AFTER_S)
        return _explained("silent", text or f"Ranks {format_ranks(silent)} do not reply.", waited_for=silent, last=last)
    states = request_states(cluster.client, cluster.busy)
    if paused := paused_ranks(states):
        lines = {states[rank].line for rank in paused}
        at = f" at line {lines.pop()}" if len(lines) == 1 else ""
        text = f"{name_ranks(paused).capitalize()} paused{at}: the debugger waits for a command in the notebook."
        return _explained("paused", text, waited_for=paused, last=last)
    if text := explain_deadlock(waits, cluster.busy, _WAITING_AFTER_S) or "":
        time.sleep(_SECOND_LOOK_S)
        again = {rank: reply.waits for rank, reply in _waits(cluster).items()}
        if explain_deadlock(again, cluster.busy, _WAITING_AFTER_S) == text:
            return _explained("deadlock", text, waited_for=[], last=last)
    waiting = missing_ranks(waits, _WAITING_AFTER_S)
    late = sorted({other for others in waiting.values() for other in others if other not in waiting})
    if text := describe_slow_ranks(waits, _WAITING_AFTER_S):
        return _explained("slow", text, waited_for=late, last=last)
    return _explained("running", "No rank has waited for another one for long.", waited_for=[], last=last)


def _waits(cluster: Cluster) -> Replies[WaitsReply]:
    return request_all(cluster.client, cluster.state.live_ranks, WaitsRequest(), timeout_s=_REPLY_TIMEOUT_S)


def _explained(kind: str, verdict: str, *, waited_for: list[int], last: dict[str, Any] | None) -> dict[str, Any]:
    text = verdict
    if kind == "idle" and last is not None and last["state"] != "ok":
        cause = last["cause"] or {}
        why = last["verdict"] or f"{cause.get('type', '')}: {cause.get('message', '')} on ranks {cause.get('ranks')}"
        text = f"{verdict} The last one {last['state']}: {why}"
    return {"kind": kind, "verdict": verdict, "waited_for": format_ranks(waited_for), "last_result": last, "text": text}


def variables(cluster: Cluster) -> dict[str, Any]:
    """Return all variables and whether the ranks agree; while a cell runs, only their names and types."""
    if not cluster.busy:
        frame = variables_frame(cluster.state)
        return {"compared": True, "variables": _rows(frame), "text": frame.to_string(index=False)}
    replies = request_all(cluster.client, cluster.state.live_ranks, NamesRequest(), timeout_s=_REPLY_TIMEOUT_S)
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, reply in replies.items():
        for name, known in reply.names.items():
            if known.type != _MODULE and name not in PREDEFINED:
                ranks.setdefault((name, known.type.removeprefix("builtins.")), []).append(rank)
    rows = [{"name": name, "type": kind, "on_ranks": format_ranks(on)} for (name, kind), on in sorted(ranks.items())]
    text = "\n".join(f"{row['name']}  {row['type']}  (ranks {row['on_ranks']})" for row in rows)
    return {"compared": False, "variables": rows, "text": f"A cell is running: names and types only.\n{text}"}


def difference(cluster: Cluster, name: str, from_rank: int = 0) -> dict[str, Any]:
    """Return where a variable differs from that of `from_rank`."""
    frame = difference_frame(cluster.state, name, from_rank)
    text = "\n".join(filter(None, [summary_of(name, frame), "" if frame.empty else frame.to_string(index=False)]))
    return {"name": name, "differences": _rows(frame), "text": text}


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    return rows


def timeline(cluster: Cluster, limit: int = 20) -> dict[str, Any]:
    """Return where the recorded time went: an entry for each call, those with most time first.

    `seconds` is the sum over ranks, `waited_s` how much of it was waiting for the last rank to join, and `waited_for`
    the rank that was last most often.
    """
    frame = cluster.spans.recorded().to_frame()
    rows: list[dict[str, Any]] = []
    for (kind, name), calls in frame.groupby(["kind", "name"]):
        late = calls["waited_for"].dropna()
        rows.append(
            {
                "kind": kind,
                "name": name,
                "calls": len(calls),
                "seconds": round(float(calls["seconds"].sum()), 6),
                "slowest_rank": int(str(calls.groupby("rank")["seconds"].sum().idxmax())),
                "waited_s": round(float(calls["waited_s"].sum()), 6),
                "waited_for": int(late.mode()[0]) if len(late) else None,
            }
        )
    rows.sort(key=lambda row: -row["seconds"])
    shown = rows[: max(1, limit)]
    text = "\n".join(f"{row['seconds']:9.3f} s  {row['calls']:6} x  {row['name']}  ({row['kind']})" for row in shown)
    return {"calls": shown, "omitted": len(rows) - len(shown), "text": text or "Nothing was recorded."}


def logs(cluster: Cluster, run: str | None, since: Mapping[str, int]) -> dict[str, Any]:
    """Return what ranks printed in a cell, and the end of what they wrote outside of cells.

    Args:
        cluster: The cluster.
        run: Id of the cell's run; None: the last one.
        since: By rank, the number of the last message that the program has, as `since` of the last reply says.
    """
    ranks = cluster.state.live_ranks
    name = run if run is not None else cluster.cells.last_run
    try:
        requests = {rank: CellsRequest(name, int(since.get(str(rank), 0))) for rank in ranks}
    except (TypeError, ValueError):
        raise UsageError(f"since must have a number for each rank; got {since!r}.") from None
    replies = request_each(cluster.client, requests, timeout_s=_REPLY_TIMEOUT_S)
    last = {rank: reply.cells[-1] for rank, reply in replies.items() if reply.cells} if name is not None else {}
    text = {rank: _printed(report) for rank, report in last.items()}
    output = [group for group in folded(text, "text") if group["text"]]
    outside = {} if since else {rank: _tail(cluster, rank) for rank in ranks}
    return {
        "run": name,
        "running": any(report.outcome is None for report in last.values()),
        "output": output,
        "outside": [group for group in folded(outside, "text") if group["text"]],
        "since": {str(rank): report.last for rank, report in last.items()},
        "text": "\n".join(f"[ranks {group['ranks']}]\n{group['text']}" for group in output) or "Nothing was printed.",
    }


def _printed(report: CellReport) -> str:
    return "".join(content.get("text", "") for kind, content in report.messages if kind == "stream")


def _tail(cluster: Cluster, rank: int) -> str:
    """Return the end of what a rank of this host wrote outside of cells."""
    try:
        with open(cluster.connection.run_dir.rank_log(rank), "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _MAX_LOG_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def folded(values: Mapping[int, Any], name: str) -> list[dict[str, Any]]:
    """Return an entry for each distinct value, with the ranks that have it.

    Args:
        values: Plain JSON values by rank.
        name: The value's key in an entry.
    """
    sharing: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        sharing.setdefault(json.dumps(value, sort_keys=True, default=str), []).append(rank)
    return [{"ranks": format_ranks(ranks), name: values[ranks[0]]} for ranks in sharing.values()]


def described(value: Any) -> Any:
    """Return a value as it is if it is a short plain JSON value; else what describes it."""
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        facts = {"shape": list(shape), "dtype": str(value.dtype)}
        return {**facts, "values": value.tolist()} if getattr(value, "size", 0) <= _MAX_ELEMENTS else facts
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ""
    if text and len(text) <= _MAX_VALUE_TEXT:
        return value
    shown = repr(value)
    return shown if len(shown) <= _MAX_VALUE_TEXT else f"{shown[:_MAX_VALUE_TEXT]}…"
