"""What is slowed: how it reads, and how long messages over slow links take."""

from __future__ import annotations

import pytest

from axon_nb.errors import UsageError
from axon_nb.records.protocol.wire import decode, encode
from axon_nb.records.slowness import SlowLink, Slowness, collective_delay_s, message_delay_s

LINK = Slowness().with_link(SlowLink((0, 1), 0.005, 100.0))
ALL = Slowness().with_link(SlowLink((), 0.001))
RANKS = [0, 1, 2, 3]
MESSAGE_S = 0.005 + 12_500 / 12.5e6
"""Of 12,500 bytes over `LINK`."""


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
