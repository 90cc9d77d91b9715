"""Spans of ranks that train together, made of parts that each cost something, or of which one is late."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from axon_nb.records.spans import Span
from axon_nb.records.training.steps import Recording, record_steps

GROUPS = {"0": (0, 1)}
Part = Callable[["Steps", int], None]


class Steps:
    """Spans of two ranks in step: what each part of a step adds, in milliseconds."""

    def __init__(self, *parts: Part, num_steps: int = 5) -> None:
        self.now = [0.0, 0.0]
        self.spans: list[Span] = []
        self.sequence = 0
        for step in range(num_steps):
            for part in parts:
                part(self, step)
            self.run("optimizer", 1.0)

    def run(self, kind: str, length: float, rank: int | None = None) -> None:
        """Run something on one or both ranks."""
        for one in (0, 1) if rank is None else (rank,):
            self.spans.append(span_of(one, kind, kind, self.now[one], self.now[one] + length))
            self.now[one] += length

    def rest(self, length: float, rank: int | None = None) -> None:
        """Run code of the ranks' own."""
        for one in (0, 1) if rank is None else (rank,):
            self.now[one] += length

    def call(self, name: str, length: float, size: int, within: str = "") -> None:
        """Wait for a collective, perhaps inside of something."""
        self.sequence += 1
        end = max(self.now) + length
        more = {"group": "0", "sequence": self.sequence}
        for rank, start in enumerate(self.now):
            self.spans.append(span_of(rank, "collective", name, start, end, bytes=size, **more))
            self.spans.append(span_of(rank, "wait", name, start, end, **more))
            if within:
                self.within(rank, within, start, end)
        self.now = [end, end]

    def within(self, rank: int, kind: str, start: float, end: float) -> None:
        """Let the rank's last span of this kind go on; it starts here if it is over."""
        for place, span in enumerate(self.spans):
            if (span.rank, span.kind, span.end_ns) == (rank, kind, round(start * MS)):
                self.spans[place] = span._replace(end_ns=round(end * MS))
                return
        self.spans.append(span_of(rank, kind, kind, start, end))

    def recording(self) -> Recording:
        """The steps as they are read."""
        recording = record_steps(self.spans, GROUPS)
        assert recording is not None
        return recording


def compute(steps: Steps, _: int) -> None:
    steps.run("forward", 10.0)
    steps.run("backward", 20.0)


def reduce(steps: Steps, _: int) -> None:
    steps.call("all_reduce", 1.0, 4 << 20, "backward")


def slow_loader(steps: Steps, _: int) -> None:
    steps.run("data", 15.0)


def late_data(steps: Steps, _: int) -> None:
    steps.run("data", 15.0, rank=1)


def late_code(steps: Steps, _: int) -> None:
    steps.rest(15.0, rank=1)


def late_compute(steps: Steps, _: int) -> None:
    steps.run("forward", 15.0, rank=1)


def collection(steps: Steps, _: int) -> None:
    steps.run("gc", 15.0)


def three_backwards(steps: Steps, step: int) -> None:
    for _ in range(3):
        compute(steps, step)
        steps.call("all_reduce", 15.0, 4 << 20, "backward")


def many_small(steps: Steps, _: int) -> None:
    for _ in range(20):
        steps.call("all_reduce", 2.0, 4000, "backward")


def after_backward(steps: Steps, _: int) -> None:
    for _ in range(4):
        steps.call("all_reduce", 4.0, 2 << 20)


def gathered_twice(steps: Steps, _: int) -> None:
    steps.call("all_gather_single", 10.0, 4 << 20, "forward")
    steps.run("backward", 20.0)
    steps.call("all_gather_single", 10.0, 4 << 20, "backward")


def long_sums(steps: Steps, _: int) -> None:
    steps.call("all_reduce", 30.0, 64 << 20, "backward")


MS = 1_000_000
"""Nanoseconds."""


def straggling_spans(ranks: int, *, steps: int = 6, late: int = 2) -> list[Span]:
    """DDP: forwards, backwards with overlapping buckets, an optimizer; one rank sleeps in its own code each step."""
    noise, spans = random.Random(7), []
    number = 0
    for step in range(steps):
        begin = {rank: step * 120 + 8 + noise.random() * 2 + (40 if rank == late else 0) for rank in range(ranks)}
        starts = {rank: begin[rank] + 22 + noise.random() for rank in range(ranks)}
        spans += [span_of(rank, "forward", "GPT", begin[rank], starts[rank]) for rank in range(ranks)]
        ends = []
        for bucket in range(6):
            number += 1
            own = {rank: starts[rank] + 8 + 5 * bucket + noise.random() for rank in range(ranks)}
            end = max(own.values()) + 6
            ends.append(end)
            spans += [
                span_of(rank, "collective", "all_reduce", own[rank], end, group="0", bytes=4 << 20, sequence=number)
                for rank in range(ranks)
            ]
        for rank in range(ranks):
            end = max(ends) + noise.random() / 5
            spans.append(span_of(rank, "backward", "backward", starts[rank], end))
            spans.append(span_of(rank, "optimizer", "AdamW", end + 0.3, end + 7 + noise.random()))
    spans = [span._replace(line=12) if span.kind == "collective" else span for span in spans]
    last = max(span.end_ns for span in spans) / MS
    return [*spans, *(span_of(rank, "cell", "In [9]", 0, last + 2) for rank in range(ranks))]


def span_of(rank: int, kind: str, name: str, start: float, end: float, **more: Any) -> Span:
    return Span(rank, kind, name, round(start * MS), round(end * MS))._replace(**more)
