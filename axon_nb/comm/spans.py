"""Spans of communication, for groups that do not record their own, and of what a GPU does, on one clock.

A GPU is timed by events in its queue, which are read once they have happened.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from typing import Any, NamedTuple

import torch

from axon_nb.comm.calls import report_payload
from axon_nb.comm.group import Backend, ProcessGroup
from axon_nb.records.spans import GPU, LAUNCH, Span, SpanRing, emit, ring

now = time.monotonic_ns
"""The clock of spans, in nanoseconds."""
_MAX_PENDING = 4096
_MAX_PASSED = 1024
_ANCHOR_NS = 10_000_000_000
"""Age from which an anchor is replaced: CUDA measures in float32 milliseconds, 1 µs apart after 10 s."""
_ANCHOR_WAIT_NS = 2_000_000
"""Longest wait for an anchor: other work may be ahead of it, in spite of its own stream."""
_ANCHOR_TRIES = 3


def record(group: ProcessGroup, name: str, start_ns: int, size: int, *, kind: str = "collective") -> None:
    """Record the span of a finished call.

    Args:
        group: The group of the call.
        name: Name of the operation.
        start_ns: Start of the call, by `now`.
        size: What this rank passed in, in bytes.
        kind: ``collective`` or ``p2p``.
    """
    info = group.info
    if not info.emits_spans:
        whole = size * len(info.ranks) if name == "all_gather" else size
        emit(Span(info.ranks[info.rank], kind, name, start_ns, now(), info.name, whole))
        if info.backend is not Backend.MOCK:  # mock groups report their calls
            report_payload(info.ranks[info.rank], name, size, len(info.ranks), group.torch_group)


class Moment(NamedTuple):
    """When something began."""

    ns: int
    """The host's time, by `now`."""
    device: torch.device | None = None
    """Where the work runs; None: on the CPU, whose time is the host's."""
    event: Any = None
    """What the device's queue reaches at this moment; None: the device's time is not known."""


class _Anchor(NamedTuple):
    ns: int
    event: Any


class _Pending(NamedTuple):
    span: Span
    anchor: _Anchor
    begin: Any
    end: Any


class DeviceClock:
    """Records spans of work on GPUs with the GPU's own times."""

    def __init__(self, spans: SpanRing) -> None:
        self._ring = spans
        self._lock = threading.Lock()
        self._anchors: dict[torch.device, _Anchor] = {}
        self._pending: deque[_Pending] = deque()
        self._passed: deque[tuple[int, int]] = deque(maxlen=_MAX_PASSED)

    def moment(self, device: torch.device) -> Moment:
        """Return the beginning of work on `device`; an event marks it if the device has them."""
        if device.type == "cpu":
            return Moment(now())
        begin = now()
        return Moment(begin, device, _record(device))

    def emit(self, span: Span, since: Moment) -> None:
        """Record a span that ends now: with the device's times once it has come so far, or as a launch.

        Args:
            span: With the host's times.
            since: Its beginning.
        """
        if since.device is None or not torch.get_device_module(since.device).is_initialized():
            self._ring.emit(span)  # the host did the work itself
            return
        end = None if since.event is None else _record(since.device)
        anchor = None if end is None else self._anchor(since.device)
        if anchor is None:
            self._ring.emit(span._replace(clock=LAUNCH))
            return
        with self._lock:
            self._pending.append(_Pending(span, anchor, since.event, end))
            if len(self._pending) > _MAX_PENDING:
                self._ring.emit(self._pending.popleft().span._replace(clock=LAUNCH))
        self.collect()

    def collect(self) -> None:
        """Record the spans whose work is done; from any thread, without waiting for the device."""
        with self._lock:
            while self._pending and (span := _read(self._pending[0])) is not None:
                launched = self._pending.popleft().span
                if span.clock == GPU:
                    self._passed += [(launched.start_ns, span.start_ns), (launched.end_ns, span.end_ns)]
                self._ring.emit(span)

    def estimate(self, launched_ns: int) -> int:
        """Estimate when the device came to work that was launched at a time of the host, in nanoseconds.

        Between two events, its progress is taken as proportional to that of the host. Never before the launch.
        """
        with self._lock:
            passed = list(self._passed)
        after = bisect_right(passed, launched_ns, key=lambda pair: pair[0])
        if after == 0:
            return launched_ns
        host, device = passed[after - 1]
        if after == len(passed):
            return max(launched_ns, device)
        next_host, next_device = passed[after]
        share = (launched_ns - host) / max(1, next_host - host)
        return max(launched_ns, device + round(share * (next_device - device)))

    def _anchor(self, device: torch.device) -> _Anchor | None:
        anchor = self._anchors.get(device)
        if anchor is None or now() - anchor.ns > _ANCHOR_NS:
            tries = [_make_anchor(device) for _ in range(_ANCHOR_TRIES)]
            if best := min(filter(None, tries), default=None):
                anchor = self._anchors[device] = best[1]
        return anchor


def _record(device: torch.device) -> Any:
    """Return an event at this place of the device's queue; None if it has none, or records a graph instead of work."""
    module = torch.get_device_module(device)
    try:
        if not module.is_initialized() or module.is_current_stream_capturing():
            return None
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(device))
    except (AttributeError, RuntimeError):  # another kind of device; or its context is lost
        return None
    return event


def _make_anchor(device: torch.device) -> tuple[int, _Anchor] | None:
    """Return an event whose time the host knows, after the nanoseconds by which that may be wrong; None: none came."""
    module = torch.get_device_module(device)
    try:
        event, stream = module.Event(enable_timing=True), module.Stream(device)
        before = now()
        event.record(stream)
        while not event.query():
            if now() - before > _ANCHOR_WAIT_NS:
                return None
    except RuntimeError:
        return None
    after = now()
    return after - before, _Anchor((before + after) // 2, event)


def _read(pending: _Pending) -> Span | None:
    """Return the span with the device's times, as a launch if it never gets there; None: it is not done."""
    span, anchor, begin, end = pending
    try:
        if not end.query():
            return None
        start_ns = anchor.ns + round(anchor.event.elapsed_time(begin) * 1e6)
        length_ns = round(begin.elapsed_time(end) * 1e6)
    except RuntimeError:  # its context is lost
        return span._replace(clock=LAUNCH)
    return span._replace(start_ns=start_ns, end_ns=start_ns + length_ns, clock=GPU)


device_clock = DeviceClock(ring)
"""The clock of this process's devices."""
