"""Spans, the ring that keeps the last ones, the trace that shows them, and the clocks that they are on."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.records import MemoryUse, Shard, Span
from axon_nb.records.spans import ClockEstimate, SpanRing, is_suppressed, suppress_spans, write_chrome_trace

MS = 1_000_000


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


def exchanges(
    estimate: ClockEstimate, *, ahead_ns: float, drift: float = 0.0, delay_ns: int, jitter_ns: int, seconds: int
) -> tuple[int, int]:
    """Ask twice per second; return the time of the last answer, and the true offset then."""
    randomness, now = random.Random(1), 0
    for asked in range(0, seconds * 1000 * MS, 500 * MS):
        there, back = (delay_ns + int(randomness.expovariate(1 / jitter_ns)) for _ in range(2))
        arrived, now = asked + there, asked + there + back + MS

        def other(time_ns: int) -> int:
            return round(time_ns * (1 + drift) + ahead_ns)

        estimate.add(asked, other(arrived), other(arrived + MS), now)
    return now, round(-ahead_ns - drift * now)


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
def test_offset_is_within_a_millisecond_over_a_slow_link_and_follows_drift(drift: float) -> None:
    estimate = ClockEstimate()
    now, offset = exchanges(estimate, ahead_ns=5e15, drift=drift, delay_ns=5 * MS, jitter_ns=3 * MS, seconds=600)
    clock = estimate.at(now)
    assert clock is not None
    assert abs(clock.offset_ns - offset) < MS
    assert abs(clock.offset_ns - offset) <= clock.error_ns < 7 * MS


def test_error_holds_for_a_link_that_delays_one_direction_only() -> None:
    estimate = ClockEstimate()
    estimate.add(0, 1000 * MS + 10 * MS, 1000 * MS + 10 * MS, 11 * MS)
    clock = estimate.at(11 * MS)
    assert clock is not None
    assert abs(clock.offset_ns + 1000 * MS) <= clock.error_ns == 5.5 * MS


def test_error_grows_while_nothing_is_heard() -> None:
    estimate = ClockEstimate()
    assert estimate.at(0) is None
    estimate.add(0, MS, MS, 2 * MS)
    soon, late = estimate.at(2 * MS), estimate.at(60_000 * MS)
    assert soon is not None
    assert late is not None
    assert (soon.offset_ns, late.offset_ns) == (0, 0)
    assert late.error_ns > soon.error_ns + 5 * MS


def test_host_that_was_suspended_is_estimated_again() -> None:
    estimate = ClockEstimate()
    estimate.add(0, MS, MS, 2 * MS)
    estimate.add(500 * MS, 101 * MS, 101 * MS, 502 * MS)
    clock = estimate.at(502 * MS)
    assert clock is not None
    assert (clock.offset_ns, clock.error_ns) == (400 * MS, MS)
