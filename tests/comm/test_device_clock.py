"""Spans of work on a device have its own times: a device written in Python stands in for the GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from axon_nb.comm.spans import DeviceClock
from axon_nb.engine.groups.flight_recorder import FinishedCalls
from axon_nb.engine.inspection.views import SpanReader
from axon_nb.engine.session import RankSession
from axon_nb.records.protocol.recovery import JoinConfig
from axon_nb.records.spans import Span, SpanRing, ring
from tests.engine.groups.native_ranks import run_on_ranks
from tests.engine.groups.recorded_dump import dump_of, entry
from tests.support.fake_device import install

_MS = 1_000_000


class _Queued(nn.Linear):
    """A layer that keeps the device busy for 50 ms, and for 80 ms in its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.get_device_module("standin").work(50)
        y = super().forward(x)
        y.register_hook(lambda _: torch.get_device_module("standin").work(80))
        return y


def _session(device: torch.device) -> RankSession:
    config = JoinConfig(
        0, 1, 0, str(device), 1, rank=0, world_size=1, backend="gloo", store="", timeout_s=60.0, recoverable=True,
        output_limit=1000,
    )  # fmt: skip
    return RankSession(config, None, device)


def _train(rank: int, store: Any) -> list[list[Any]]:
    reader = SpanReader(_session(install()))
    reader.read(since=0, watch_s=60)
    model = _Queued(2, 2)
    first = ring.position
    # While the device is behind, a pause of this process leaves no gap in its queue.
    torch.get_device_module("standin").work(2000)
    model(torch.ones(1, 2)).sum().backward()
    launched_ns = time.monotonic_ns()
    found: list[list[Any]] = []
    while len(found) < 2 and time.monotonic_ns() < launched_ns + 60_000 * _MS:
        found += reader.read(since=first + len(found), watch_s=0).spans
    return [*found, [launched_ns]]


def test_forward_and_backward_have_the_devices_times(tmp_path: Path) -> None:
    *rows, (launched_ns,) = run_on_ranks(_train, 1, tmp_path)[0]
    forward, backward = (Span(*row) for row in rows)
    assert [(span.kind, span.clock) for span in (forward, backward)] == [("forward", "gpu"), ("backward", "gpu")]
    lengths = [span.end_ns - span.start_ns for span in (forward, backward)]
    assert [round(length / _MS) for length in lengths] == [50, 80]
    # The host was done with both long before; the device did one after the other.
    assert abs(backward.start_ns - forward.end_ns) <= 1000
    assert launched_ns < backward.end_ns
    # On the host's clock, although the device counts from another origin.
    assert abs(forward.start_ns - launched_ns) < 60_000 * _MS


def _launches(rank: int, store: Any) -> list[str]:
    device = install()
    module = torch.get_device_module(device)
    spans = SpanRing()
    clock = DeviceClock(spans)

    def record() -> None:
        clock.emit(Span(0, "forward", "F", 1, 2), start)

    start = clock.moment(torch.device("cpu"))
    record()
    module.is_used = False
    start = clock.moment(device)
    record()
    module.is_used = True
    module.is_capturing = True  # an event would become a part of the graph
    start = clock.moment(device)
    record()
    module.is_capturing = False
    start = clock.moment(device)
    module.work(10_000)  # and it is never done while this runs
    record()
    return [span.clock or "host" for span in spans.since(0)[0]]


def test_span_without_events_is_a_launch(tmp_path: Path) -> None:
    assert run_on_ranks(_launches, 1, tmp_path)[0] == ["host", "host", "launch"]


def _collectives(rank: int, store: Any) -> list[tuple[str, int]]:
    device = install()
    module = torch.get_device_module(device)
    spans = SpanRing()
    clock = DeviceClock(spans)
    start = clock.moment(device)
    module.work(200)
    launched_ns = time.monotonic_ns()
    clock.emit(Span(0, "backward", "backward", start.ns, time.monotonic_ns()), start)
    while not spans.position:
        clock.collect()
    (backward,) = spans.since(0)[0]
    launched = launched_ns + time.time_ns() - time.monotonic_ns()
    done = launched + 900 * _MS
    content = dump_of(entry(1, created=launched, completed=done, duration_ms=30.0))
    (span,) = FinishedCalls(0, clock).read(content, {"0"})
    began = span.start_ns - backward.start_ns
    return [(span.clock, span.end_ns - span.start_ns), ("within", int(0 <= began <= 200 * _MS)), ("launch", began)]


def test_collective_begins_while_the_device_is_in_the_backward_that_launched_it(tmp_path: Path) -> None:
    (clock, length), within, _ = run_on_ranks(_collectives, 1, tmp_path)[0]
    assert (clock, length, within) == ("gpu", 30 * _MS, ("within", 1))
