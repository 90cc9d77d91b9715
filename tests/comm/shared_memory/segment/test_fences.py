"""Readers of reasons and refusals read the word that publishes them first, and a fence stands in between.

No processor here reorders loads, so this checks the order of accesses in the code that runs on aarch64.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from axon_nb.comm.shared_memory.segment import futex
from axon_nb.comm.shared_memory.segment.memory import Layout, SharedMemory
from axon_nb.comm.shared_memory.segment.progress import Progress
from axon_nb.comm.shared_memory.segment.rings import InRing, OutRing


class Words:
    """Words of shared memory that record when they are read."""

    def __init__(self, words: Any, events: list[str]) -> None:
        self._words, self._events = words, events

    def __getitem__(self, place: int) -> int:
        value: int = self._words[place]
        self._events.append(f"read {value}")
        return value

    def __setitem__(self, place: int, value: int) -> None:
        self._words[place] = value


def refusal(ranks: list[Progress], words: Words) -> None:
    InRing(ranks[1].memory, 0, 1).refuse(111, 222, 333)
    ring = OutRing(ranks[0].memory, 0, 1)
    ring._words = words  # type: ignore[assignment]
    assert ring.refused() == (111, 222, 333)


def reason(ranks: list[Progress], words: Words) -> None:
    ranks[1].words[ranks[1].own + 14] = 0
    ranks[1].leave("x" * 222)
    ranks[0].words = words  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="x" * 222):
        ranks[0].raise_if_left()


def readiness(ranks: list[Progress], words: Words) -> None:
    ranks[0].words = words  # type: ignore[assignment]
    ranks[0].wait_until_ready(time.monotonic() + 60)
    assert ranks[0].words[ranks[1].own] == 0


READS: dict[str, tuple[Callable[[list[Progress], Words], None], list[str]]] = {
    "refusal": (refusal, ["read 111", "fence", "read 222", "read 333"]),
    "reason": (reason, ["read 1", "fence", "read 222"]),
    "readiness": (readiness, ["read 1", "fence", "read 0"]),
}


@pytest.mark.parametrize("name", READS)
def test_a_fence_stands_between_the_publishing_word_and_what_it_publishes(name: str, monkeypatch: Any) -> None:
    layout = Layout.of(2, 1 << 20)
    descriptor = SharedMemory.create(layout)
    ranks = [Progress(SharedMemory(descriptor, layout), rank, [0, 1], None) for rank in range(2)]
    os.close(descriptor)
    events: list[str] = []
    read, expected = READS[name]
    monkeypatch.setattr(futex, "NEEDS_FENCE", True)
    monkeypatch.setattr(futex, "fence", lambda: events.append("fence"))
    words = Words(ranks[0].words, events)
    read(ranks, words)
    assert events[events.index(expected[0]) :] == expected  # before are the fences of the rank that writes
