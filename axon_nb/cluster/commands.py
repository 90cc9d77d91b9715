"""What the commands of `records/commands.py` do: each function is one, and returns plain JSON values.

Most only look, from any thread, and change no rank; they work while a cell runs. Ranks with the same value share an
entry, and large values are described.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.inspection.status import cluster_card, paused_ranks, request_states
from axon_nb.cluster.inspection.variables import PREDEFINED, difference_frame, summary_of, variables_frame
from axon_nb.cluster.rpc import Replies, request_all, request_each
from axon_nb.errors import UsageError
from axon_nb.host.run_dir import list_run_dirs
from axon_nb.records.protocol.cells import CellReport, CellsRequest, NamesRequest
from axon_nb.records.protocol.inspection import WaitsReply, WaitsRequest
from axon_nb.records.ranks import format_ranks, name_ranks, ranks_by
from axon_nb.records.waits import describe_silent_ranks, describe_slow_ranks, explain_deadlock, missing_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.cluster import Cluster

_MAX_LOG_BYTES = 8192
_MAX_ELEMENTS = 256
_MAX_VALUE_TEXT = 4000
_REPLY_TIMEOUT_S = 2.0
_WAITING_AFTER_S = 0.5
_SECOND_LOOK_S = 0.3
"""A deadlock is proven if two observations this far apart show the same calls."""
_MODULE = "builtins.module"
_ROW = ("rank", "host", "pid", "device", "state", "device_bytes", "cell")


def perform(cluster: Cluster, command: str, /, **options: Any) -> dict[str, Any]:
    """Do what a command does.

    Args:
        cluster: The cluster.
        command: Its name in `records.commands.COMMANDS`.
        options: All its options.
    """
    return _FUNCTIONS[command](cluster, **options)


def rename(cluster: Cluster, new_name: str) -> dict[str, Any]:
    """Give the cluster another name.

    Raises:
        UsageError: the name has other characters, or another cluster has it.
    """
    if not re.fullmatch(r"[\w.-]+", new_name):
        raise UsageError(f"A cluster's name takes letters, digits, `.`, `_` and `-`; got {new_name!r}.")
    old, own = cluster.name, cluster.connection.run_dir.path
    if any(one.read_info().get("name") == new_name for one in list_run_dirs() if one.path != own):
        raise UsageError(f"You have a cluster {new_name!r} already: choose another name.")
    cluster.state.rename(new_name)
    return {"name": new_name, "text": f"The cluster {old!r} is now {new_name!r}."}


def interrupt(cluster: Cluster) -> dict[str, Any]:
    """Interrupt all running cells, as the notebook's stop button does."""
    ranks = format_ranks(cluster.cancel())
    return {"ranks": ranks, "text": f"Interrupted the cell on ranks {ranks}." if ranks else "No cell is running."}


def repair(
    cluster: Cluster, ranks: str | None, from_rank: int | None, host: str | None, names: Sequence[str]
) -> dict[str, Any]:
    """Replace dead ranks, and live ones that are named."""
    text = str(cluster.repair(ranks, from_rank=from_rank, names=names, host=host))
    return {"repaired": text, "text": text}


def status(cluster: Cluster) -> dict[str, Any]:
    """Return the state of each rank, which ranks are busy, and the result of the last cell."""
    busy = format_ranks(cluster.busy)  # before the states: without a cell, none of them is one of a cell
    info = cluster.info()
    return {
        "name": info.name,
        "backend": info.backend,
        "engines": info.engines,
        "num_ranks": info.num_ranks,
        "running": info.running,
        "busy": busy,
        "dead": format_ranks(cluster.health.dead),
        "slowed": info.slowed,
        "owner_pid": os.getpid(),
        "ranks": [{**{name: getattr(row, name) for name in _ROW}, "memory_bytes": row.rss_bytes} for row in info.ranks],
        "mesh": None if info.mesh is None else str(info.mesh),
        "last_result": cluster.cells.last_record,
        "text": cluster_card(info)["text/plain"],
    }


def stacks(cluster: Cluster, ranks: str | None) -> dict[str, Any]:
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


def diff(cluster: Cluster, name: str, from_rank: int) -> dict[str, Any]:
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
    sharing = ranks_by((json.dumps(values[rank], sort_keys=True, default=str), rank) for rank in sorted(values))
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


_FUNCTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "diff": diff,
    "explain": explain,
    "interrupt": interrupt,
    "rename": rename,
    "repair": repair,
    "stacks": stacks,
    "status": status,
    "vars": variables,
}
