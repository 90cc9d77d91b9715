"""Advice on recorded steps, and what it reads: spans, the ring that keeps them, their trace and their clocks."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.errors import UsageError
from axon_nb.records import MemoryUse, Shard, Span
from axon_nb.records.performance import Advice, advise
from axon_nb.records.protocol.wire import decode, encode
from axon_nb.records.slowness import SlowLink, Slowness, collective_delay_s, message_delay_s
from axon_nb.records.spans import ClockEstimate, SpanRing, is_suppressed, suppress_spans, write_chrome_trace
from axon_nb.records.training.steps import PipelineStep, record_steps
from tests.support.records.steps import (
    GROUPS,
    Part,
    Steps,
    after_backward,
    collection,
    compute,
    gathered_twice,
    late_code,
    late_compute,
    late_data,
    long_sums,
    many_small,
    reduce,
    slow_loader,
    span_of,
    straggling_spans,
    three_backwards,
)

LINK = Slowness().with_link(SlowLink((0, 1), 0.005, 100.0))
ALL = Slowness().with_link(SlowLink((), 0.001))
RANKS = [0, 1, 2, 3]
MESSAGE_S = 0.005 + 12_500 / 12.5e6
"""Of 12,500 bytes over `LINK`."""


def best(*parts: Part) -> Advice:
    return advise(Steps(*parts).recording())[0]


def test_replay_repeats_the_measured_step() -> None:
    for spans, groups in (
        (straggling_spans(4), {"0": (0, 1, 2, 3)}),
        (Steps(compute, reduce, lambda s, n: s.rest(5.0 + n, n % 2)).spans, GROUPS),
    ):
        recording = record_steps(spans, groups)
        assert recording is not None
        assert recording.replay() == pytest.approx(recording.measured_s, rel=1e-6)


def test_balanced_program_gets_no_advice() -> None:
    assert advise(Steps(compute, reduce).recording()) == []


def test_fewer_than_two_steps_are_no_recording() -> None:
    assert record_steps(Steps(compute, num_steps=1).spans, GROUPS) is None
    assert record_steps([], GROUPS) is None


@pytest.mark.parametrize(
    ("parts", "cause", "gain"),
    [
        ((slow_loader, compute, reduce), "data loading", 15 / 47),
        ((late_data, compute, reduce), "straggler: data", 15 / 47),
        ((late_code, compute, reduce), "straggler: own code", 15 / 47),
        ((late_compute, compute, reduce), "straggler: forward", 15 / 47),
        ((collection, compute, reduce), "garbage collection", 15 / 47),
        ((three_backwards,), "no_sync", 30 / 136),
        ((compute, many_small), "small buckets", 38 / 71),
        ((compute, gathered_twice), "resharding", 10 / 71),
        ((compute, long_sums), "communication", 15 / 61),
    ],
)
def test_cause_is_named_first_with_what_it_costs(parts: Sequence[Part], cause: str, gain: float) -> None:
    first = best(*parts)
    assert first.cause == cause
    assert first.gain == pytest.approx(gain, abs=0.02)
    assert f"A step takes {first.gain:.0%} less then." in str(first)


def test_sums_after_the_backward_are_hidden_as_far_as_ddp_would() -> None:
    # A bucket of the last layer after a quarter of the backward, and the rest at its end.
    first = best(compute, after_backward)
    assert first.cause == "exposed communication"
    assert first.gain == pytest.approx(4 / 47, abs=0.02)


def test_rank_that_is_late_now_and_then_is_no_straggler() -> None:
    recording = Steps(compute, reduce, lambda steps, step: steps.rest(15.0, step % 2)).recording()
    assert not any(advice.cause.startswith("straggler") for advice in advise(recording))


def test_pipeline_is_advised_to_balance_its_stages_or_to_split_its_batch() -> None:
    recording = Steps(compute).recording()
    measured = tuple(
        span_of(stage, "forward", "F", start, start + length, stage=stage, microbatch=microbatch)
        for stage, length in ((0, 3.0), (1, 6.0))
        for microbatch, start in ((0, 3.0 * stage), (1, 3.0 * stage + length))
    )
    ideal = tuple(
        span_of(stage, "forward", "F", start, start + 4.0, stage=stage, microbatch=microbatch)
        for stage in (0, 1)
        for microbatch, start in ((0, 4.0 * stage), (1, 4.0 * stage + 4.0))
    )
    uneven, bubble = advise(recording, [PipelineStep("0", measured, ideal)])
    assert (uneven.cause, bubble.cause) == ("uneven stages", "bubble")
    assert uneven.gain == pytest.approx(15 / 31 * (1 - 12 / 15))
    assert bubble.gain == pytest.approx(12 / 31 * (1 / 3) / 2)
    assert "stage 1 computes 12 ms per step, the others 6 ms" in uneven.claim
    assert "4 microbatches instead of 2" in bubble.change


def test_slowness_reads_as_one_line_and_survives_the_wire() -> None:
    slowness = LINK.with_ranks([2, 3], 2.0).with_ranks([3], 1.5)
    assert str(slowness) == "rank 2 × 2; rank 3 × 1.5; link 0-1: 100 Mbit/s, 5 ms"
    assert decode(Slowness, encode(slowness)) == slowness
    assert slowness.factor_of(3) == 1.5
    assert slowness.factor_of(0) == 1.0
    assert str(slowness.on_world(3)) == "rank 2 × 2; link 0-1: 100 Mbit/s, 5 ms"
    assert not Slowness()


def test_named_link_counts_before_all_links_until_all_are_set_again() -> None:
    both = ALL.with_link(SlowLink((1, 2), 0.002))
    assert message_delay_s(both, 2, 1, 0) == 0.002
    assert message_delay_s(both, 2, 3, 0) == 0.001
    assert message_delay_s(both, 2, 2, 0) == 0.0
    assert both.with_link(SlowLink((), 0.003)).links == (SlowLink((), 0.003),)


@pytest.mark.parametrize(
    ("name", "num_bytes", "delays"),
    [
        ("all_reduce", 50_000, [6 * MESSAGE_S] * 4),
        ("all_gather_single", 50_000, [3 * MESSAGE_S] * 4),
        ("reduce_scatter", 50_000, [3 * MESSAGE_S] * 4),
        ("all_to_all_single", 50_000, [MESSAGE_S, MESSAGE_S, 0, 0]),
        ("broadcast", 12_500, [0, MESSAGE_S, 0, 0]),
        ("gather", 12_500, [MESSAGE_S, 0, 0, 0]),
        ("barrier", 0, [6 * 0.005] * 4),
    ],
)
def test_collective_ends_when_its_slowest_link_has_carried_its_parts(
    name: str, num_bytes: int, delays: list[float]
) -> None:
    assert [collective_delay_s(LINK, name, RANKS, rank, num_bytes) for rank in RANKS] == pytest.approx(delays)


def test_link_outside_the_ring_delays_messages_only() -> None:
    across = Slowness().with_link(SlowLink((0, 2), 0.005))
    assert collective_delay_s(across, "all_reduce", RANKS, 0, 1000) == 0
    assert collective_delay_s(across, "all_reduce", [0, 2], 0, 1000) == pytest.approx(0.010)
    assert message_delay_s(across, 2, 0, 1000) == 0.005


def test_what_cannot_be_slow_is_refused_in_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"--factor: must be above 1.*got 0\.5"):
        Slowness().with_ranks([1], 0.5)
    with pytest.raises(UsageError, match="two different ranks, such as 0-1; got 1 twice"):
        Slowness().with_link(SlowLink((1, 1), 0.005))
    with pytest.raises(UsageError, match="needs --mbit, --latency or both"):
        Slowness().with_link(SlowLink((0, 1)))


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
