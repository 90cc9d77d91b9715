"""Links: published formulas, presets, and fitted measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axon_nb import plan
from axon_nb.errors import UsageError
from axon_nb.parallel.models import GPTConfig
from axon_nb.plan.calibration.benchmarks import fit_line, fit_link
from axon_nb.plan.calibration.calibrate import check_collectives
from axon_nb.plan.calibration.result import Sample
from axon_nb.plan.hardware import FITTED, OPERATIONS, Rates, resolve_links, rounds_and_volume

RANKS = st.integers(2, 1024)
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def by_simulated_ring(ranks: int) -> tuple[int, float]:
    """Count rounds and sent fractions of the tensor in a ring all_reduce, step by step.

    Parts are reduced in the first lap and copied in the second.
    """
    parts = [{(rank, part): {rank} for part in range(ranks)} for rank in range(ranks)]
    held = {key: set(value) for own in parts for key, value in own.items()}
    rounds, sent = 0, 0.0
    for lap in range(2):
        for step in range(ranks - 1):
            moving = {rank: (rank - step + (lap == 1)) % ranks for rank in range(ranks)}
            copies = {rank: set(held[rank, part]) for rank, part in moving.items()}
            for rank, part in moving.items():
                held[(rank + 1) % ranks, part] |= copies[rank]
            rounds, sent = rounds + 1, sent + 1 / ranks
    assert all(value == set(range(ranks)) for value in held.values())
    return rounds, sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_ring_all_reduce_matches_a_simulated_ring(ranks: int) -> None:
    rounds, volume = rounds_and_volume("all_reduce", ranks)
    assert (rounds, volume) == pytest.approx(by_simulated_ring(ranks))


@given(RANKS)
@PROPERTY
def test_all_reduce_equals_reduce_scatter_plus_all_gather(ranks: int) -> None:
    parts = [rounds_and_volume(name, ranks) for name in ("reduce_scatter", "all_gather")]
    whole = rounds_and_volume("all_reduce", ranks)
    assert whole == pytest.approx((parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]))
    assert whole[1] < 2, "no rank sends the tensor twice: Patarasuk and Yuan, 2009"


@given(RANKS, st.sampled_from(OPERATIONS), st.floats(0, 1e9), st.floats(0, 1e9))
@PROPERTY
def test_more_bytes_take_no_less_time(ranks: int, operation: str, first: float, second: float) -> None:
    link = plan.Link("some", 1e-6, 1e9)
    low, high = sorted((first, second))
    assert link.seconds(operation, low, ranks) <= link.seconds(operation, high, ranks)


@given(RANKS, st.floats(1, 1e9))
@PROPERTY
def test_auto_is_the_faster_algorithm(ranks: int, size: float) -> None:
    for operation in OPERATIONS:
        ways = [plan.Link("x", 1e-5, 1e9, algorithm=name).seconds(operation, size, ranks) for name in ("ring", "tree")]
        assert plan.Link("x", 1e-5, 1e9).seconds(operation, size, ranks) == min(ways)


def test_trees_for_small_messages_and_rings_for_large_ones() -> None:
    ring, tree = (plan.Link("x", 1e-5, 1e9, algorithm=name) for name in ("ring", "tree"))
    assert tree.seconds("all_reduce", 100, 64) < ring.seconds("all_reduce", 100, 64)
    assert ring.seconds("all_reduce", 1e9, 64) < tree.seconds("all_reduce", 1e9, 64)


def test_presets_match_their_sources() -> None:
    """Vendors' figures: NVIDIA V100, A100, H100 and B200 datasheets; InfiniBand and Ethernet by their bit rates."""
    rates = {"nvlink2": 150, "nvlink3": 300, "nvlink4": 450, "nvlink5": 900, "ib-hdr": 25, "ib-ndr": 50}
    rates |= {"ethernet-10g": 1.25, "ethernet-100g": 12.5}
    for name, gigabytes in rates.items():
        assert plan.PRESETS[name].bandwidth_bytes_per_s == gigabytes * 1e9
    for name, link in plan.PRESETS.items():
        assert name == link.name
        assert link.source
        assert link.source in str(link)


def test_checked_sizes_are_predicted_from_the_others() -> None:
    """On a line nothing is off; a kink at one size is seen there."""
    sizes = (1000, 2000, 4000, 8000)
    straight = [Sample("dp", 4, "all_reduce", size, 1e-3 + 1e-6 * size) for size in sizes]
    assert [check.error for check in check_collectives(straight)] == pytest.approx([0, 0], abs=1e-9)
    kinked = [sample if sample.bytes != 4000 else replace(sample, seconds=0.01) for sample in straight]
    errors = {check.name: check.error for check in check_collectives(kinked)}
    assert errors["all_reduce of 4,000 bytes along dp"] == pytest.approx(0.005 / 0.01 - 1)
    assert list(check_collectives(straight[:2])) == []


def test_one_rank_sends_nothing() -> None:
    for operation in OPERATIONS:
        assert plan.PRESETS["nvlink4"].seconds(operation, 1e9, 1) == 0.0


def test_links_by_axis() -> None:
    axes = {"dp": 2, "tp": 4}
    assert resolve_links("nvlink4", axes)["tp"].name == "nvlink4"
    assert {axis: link.name for axis, link in resolve_links({"dp": "ib-hdr", "tp": "NVLINK4"}, axes).items()} == {
        "dp": "ib-hdr",
        "tp": "nvlink4",
    }
    assert resolve_links({"all": "ib-hdr", "tp": "nvlink4"}, axes)["dp"].name == "ib-hdr"
    assert resolve_links(None, axes) == {}
    assert resolve_links({"dp": "ib-hdr"}, {"dp": 2, "tp": 1}).keys() == {"dp"}


def test_scaled_bandwidth() -> None:
    link = plan.PRESETS["nvlink4"]
    assert link.scaled(0.5).bandwidth_bytes_per_s == link.bandwidth_bytes_per_s / 2
    assert "50%" in link.scaled(0.5).source
    with pytest.raises(UsageError, match="a fraction of the bandwidth"):
        link.scaled(1.5)


@given(st.floats(0, 1e-3), st.floats(1e-12, 1e-6), st.lists(st.integers(1, 10**8), min_size=2, unique=True))
@PROPERTY
def test_fit_recovers_a_line(start: float, slope: float, sizes: list[int]) -> None:
    points = [(float(size), start + slope * size) for size in sizes]
    found = fit_line(points)
    for x, y in points:
        assert found[0] + found[1] * x == pytest.approx(y, rel=1e-3)


@given(st.lists(st.tuples(st.floats(1, 1e8), st.floats(1e-6, 1)), min_size=1, max_size=8))
@PROPERTY
def test_fit_has_no_negative_coefficients(points: list[tuple[float, float]]) -> None:
    start, slope = fit_line(points)
    assert start >= 0
    assert slope >= 0
    assert math.isfinite(start + slope)


def test_fitted_link_reproduces_the_measured_times() -> None:
    samples = [
        Sample("dp", 4, operation, size, latency + size * byte)
        for operation, latency, byte in (("all_reduce", 1e-4, 1e-9), ("send", 2e-5, 5e-10))
        for size in (1 << 12, 1 << 16, 1 << 22)
    ]
    link = fit_link("dp", samples, "here")
    for sample in samples:
        assert link.seconds(sample.operation, sample.bytes, 4) == pytest.approx(sample.seconds)
    assert link.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert link.seconds("all_reduce", 1 << 20, 8) > link.seconds("all_reduce", 1 << 20, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan.Link("x", -1, 1), "must be 0 or more"),
        (lambda: plan.Link("x", 0, 0), "bandwidth_bytes_per_s above 0"),
        (lambda: plan.Link("x", 0, 1, algorithm="star"), "algorithm must be one of auto, ring, tree"),
        (lambda: plan.PRESETS["nvlink4"].seconds("shout", 1, 2), "operation must be one of all_gather"),
    ],
)
def test_bad_arguments_get_one_sentence(call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()  # type: ignore[operator]


def test_links_of_cards_follow_from_hosts_and_ports() -> None:
    """Hosts of 8 H100: NVLink inside, a port per GPU; a group with several ranks per host uses as many ports."""
    port, inside = (plan.PRESETS[name].bandwidth_bytes_per_s for name in ("ib-ndr", "nvlink4"))
    by_mesh = {
        (("dp", 8),): {"dp": FITTED.nvlink * inside},
        (("dp", 64),): {"dp": min(8 * FITTED.network * port, FITTED.nvlink * inside)},
        (("pp", 4), ("dp", 2), ("tp", 8)): {"pp": FITTED.network * port, "dp": FITTED.network * port},
        (("dp", 16), ("tp", 4)): {"dp": 2 * FITTED.network * port, "tp": FITTED.nvlink * inside},
    }
    for mesh, expected in by_mesh.items():
        links = resolve_links("h100", dict(mesh))
        assert {axis: links[axis].bandwidth_bytes_per_s for axis in expected} == pytest.approx(expected)


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_accumulated_batches_repeat_all_but_the_averaging_of_gradients(strategy: str) -> None:
    options: dict[str, Any] = {"batch": 4, "rates": Rates(1e12, 1e12), "strategy": strategy, "overlap": 0.0}
    options["links"] = plan.Link("x", 1e-5, 1e8)
    config = GPTConfig(vocab=96, context=32, hidden=64, heads=4, blocks=3)
    one, four = (plan.step_time(config, 4, gradient_accumulation=count, **options) for count in (1, 4))
    for phase, times in (("forward", 4), ("backward", 4), ("optimizer", 1)):
        assert four.parts[f"compute, {phase}"] == pytest.approx(times * one.parts[f"compute, {phase}"])
    repeated = sum(row.seconds or 0.0 for row in one.communication.select(operation="all_gather"))
    assert (repeated > 0) is (strategy == "full_shard")
    assert four.exposed_s == pytest.approx(one.exposed_s + 3 * repeated)
    assert four.flops == 4 * one.flops
    assert "4 accumulated batches" in str(four)
    assert any("only the last one's gradients are averaged" in text for text in four.assumptions)
