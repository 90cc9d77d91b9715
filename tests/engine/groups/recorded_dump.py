"""Dumps as torch's flight recorder writes them for NCCL (version 2.10 of its format)."""

from __future__ import annotations

import json
from typing import Any


def entry(
    number: int,
    *,
    created: int,
    completed: int = 0,
    started: int = 0,
    duration_ms: float | None = None,
    name: str = "all_reduce",
    group: str = "0",
    is_p2p: bool = False,
) -> dict[str, Any]:
    """Return what the recorder has of one operation on 1 MiB of float32; times in nanoseconds since 1970, 0: none."""
    state = "completed" if completed else "started" if started else "scheduled"
    fields = {
        "collective_seq_id": 0 if is_p2p else number,
        "input_dtypes": ["Float"],
        "input_sizes": [[512, 512]],
        "is_p2p": is_p2p,
        "op_id": number,
        "output_dtypes": ["Float"],
        "output_sizes": [[512, 512]],
        "p2p_seq_id": number if is_p2p else 0,
        "pg_id": 0,
        "process_group": [group, "default_pg"],
        "profiling_name": f"nccl:{name}",
        "record_id": number,
        "retired": bool(completed),
        "state": state,
        "thread_id": "140578545150848",
        "thread_name": "python",
        "time_created_ns": created,
        "time_discovered_completed_ns": completed,
        "time_discovered_started_ns": started,
        "timeout_ms": 1800000,
    }
    return fields if duration_ms is None else {**fields, "duration_ms": duration_ms}


def dump_of(*entries: dict[str, Any]) -> bytes:
    """Return the dump of these operations."""
    return json.dumps({"version": "2.10", "comm_lib_version": "2.28.9", "entries": list(entries)}).encode()
