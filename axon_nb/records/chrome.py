"""Spans as a trace file for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from axon_nb.records.span import Span

__all__ = ["chrome_trace", "write_chrome_trace"]


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Convert spans to Chrome's trace format: one process per rank, times in microseconds."""
    events: list[dict[str, Any]] = []
    ranks = set()
    for span in spans:
        ranks.add(span.rank)
        details = {"group": span.group, "bytes": span.bytes, "stage": span.stage, "microbatch": span.microbatch}
        events.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": span.start_ns / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "pid": span.rank,
                "tid": span.kind,
                "args": {key: value for key, value in details.items() if value not in ("", 0, -1)},
            }
        )
    names = [{"name": "process_name", "ph": "M", "pid": r, "args": {"name": f"rank {r}"}} for r in sorted(ranks)]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def write_chrome_trace(spans: Iterable[Span], path: Path | str) -> None:
    """Write the trace of `spans` to `path` as JSON."""
    Path(path).write_text(json.dumps(chrome_trace(spans)))
