"""Spans of a job in which one rank is late."""

from __future__ import annotations

import random
from typing import Any

from axon_nb.records.spans import Span

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
