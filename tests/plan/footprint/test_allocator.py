"""Reading a real step's memory from profiler events."""

from __future__ import annotations

from tests.plan.footprint.allocator import blocks_of, in_step


def test_peak_and_remainder() -> None:
    blocks = blocks_of([(1, 100, 8), (3, 200, 4), (4, 200, -4), (5, 300, 2), (9, 100, -8), (9, 300, -2)])
    assert in_step(blocks, 2, 6) == (12, 10)
    assert in_step(blocks, 4, 6) == (10, 10)
    assert in_step(blocks, 10, 12) == (0, 0)


def test_unrecorded_frees_end_when_the_address_is_reused() -> None:
    unseen = [(3, 100, 8), (5, 104, 2), (6, 104, -2)]
    assert in_step(blocks_of(unseen), 2, 7) == (8, 0)
    later = [(3, 100, 8), (22, 96, 16), (23, 96, -16)]
    assert in_step(blocks_of(later), 2, 7) == (8, 8)
    assert in_step(blocks_of(later), 12, 17) == (0, 0)
    assert in_step(blocks_of(later), 20, 27) == (16, 0)
    never = [(3, 100, 8), (13, 200, 1), (24, 200, -1)]
    assert in_step(blocks_of(never), 2, 7) == (8, 8)
    assert in_step(blocks_of(never), 12, 17) == (1, 1)


def test_adjacent_blocks_are_separate() -> None:
    blocks = blocks_of([(1, 100, 8), (2, 108, 8), (3, 92, 8), (4, 92, -8), (5, 108, -8), (6, 100, -8)])
    assert in_step(blocks, 0, 10) == (24, 0)
