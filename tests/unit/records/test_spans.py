"""Spans, the ring that keeps the last ones, and the trace that shows them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from axon_nb.records import MemoryUse, Shard, Span
from axon_nb.records.spans import SpanRing, is_suppressed, suppress_spans, write_chrome_trace


def span(number: int, **more: object) -> Span:
    return Span(0, "collective", f"call {number}", number, number + 1, **more)  # type: ignore[arg-type]


@given(st.integers(1, 20), st.lists(st.integers(0, 8), max_size=12))
def test_reader_gets_each_span_once_and_counts_missed_ones(capacity: int, batches: list[int]) -> None:
    ring, position, seen, lost, sent = SpanRing(capacity), 0, [], 0, 0
    for batch in batches:
        for _ in range(batch):
            ring.emit(span(sent))
            sent += 1
        fresh, position, missed = ring.since(position)
        seen += [int(item.name.split()[1]) for item in fresh]
        lost += missed
    assert seen == sorted(set(seen))
    assert len(seen) + lost == sent


def test_ring_accepts_spans_from_many_threads() -> None:
    ring = SpanRing(100_000)
    threads = [threading.Thread(target=lambda: [ring.emit(span(i)) for i in range(2000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(ring.since(0, limit=100_000)[0]), ring.position) == (16000, 16000)


def test_chrome_trace(tmp_path: Path) -> None:
    write_chrome_trace([Span(2, "collective", "allreduce", 1_000, 5_000, "0", 64)], tmp_path / "trace.json")
    name, event = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert name["args"] == {"name": "rank 2"}
    assert (event["ts"], event["dur"], event["pid"], event["args"]) == (1.0, 4.0, 2, {"group": "0", "bytes": 64})


def test_sizes_of_shards_and_memory() -> None:
    shard = Shard("w", "parameter", 1, (10, 4), (3, 4), (3, 0), ("Shard(0)",), "float32", "cpu", 48)
    assert shard.fraction == 0.3
    assert MemoryUse(0, 0, "storages", {"parameters": 3, "gradients": 4}).total == 7


def test_spans_are_suppressed_on_the_same_thread_only() -> None:
    seen_by: list[tuple[bool, ...]] = []
    with suppress_spans("forward", "backward"):
        with suppress_spans("wait"):
            seen_by.append((is_suppressed("wait"), is_suppressed("forward")))
        seen_by.append((is_suppressed("wait"), is_suppressed("forward")))
        other = threading.Thread(target=lambda: seen_by.append((is_suppressed("wait"), is_suppressed("forward"))))
        other.start()
        other.join()
    seen_by.append((is_suppressed("wait"), is_suppressed("forward")))
    assert seen_by == [(True, False), (False, True), (False, False), (False, False)]
