"""Ranks, units, placements and memory setups, as text and as JSON."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.errors import UsageError
from axon_nb.records.memory import WITH_MOMENTUM, HasClassName, LazyFunction, MemorySetup, changed
from axon_nb.records.protocol.wire import decode
from axon_nb.records.ranks import format_ranks, name_ranks, pack_ranks, parse_ranks, resolve_ranks, unpack_ranks
from axon_nb.records.telemetry import MeshInfo, MeshSlice
from axon_nb.records.units import exact_bytes, format_bytes, format_seconds

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([2], "2"), ([0, 1], "0-1"), ([3, 2, 0], "0,2-3"), ([1, 1, 5, 6, 7], "1,5-7"), (range(8), "0-7")],
)
def test_format(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [(" 0 , 2-3 ", [0, 2, 3]), ("even,odd", [0, 1, 2, 3]), ("-2:", [2, 3]), ("::2", [0, 2]), ("0,-1", [0, 3])],
)
def test_parse(spec: str, ranks: list[int]) -> None:
    assert parse_ranks(spec, 4) == ranks


@pytest.mark.parametrize(
    ("spec", "world_size", "sentence"),
    [
        ("0 2", 4, "ranks '0 2': '0 2' is not a rank; use a form such as 0,2-3."),
        ("0,,2", 4, "ranks '0,,2': '' is not a rank; use a form such as 0,2-3."),
        (":0", 4, "ranks ':0' selects none of the ranks 0 to 3."),
        ("odd", 1, "ranks 'odd' selects none of the ranks 0 to 0."),
        ("::0", 4, "ranks '::0': '::0' is not a rank; use a form such as 0,2-3."),
        ("7", 4, "rank 7 does not exist: ranks are 0 to 3."),
        ("1.5", 4, "ranks '1.5': '1.5' is not a rank; use a form such as 0,2-3."),
    ],
)
def test_invalid_ranks_are_reported_in_one_sentence(spec: str, world_size: int, sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_ranks(spec, world_size)
    assert str(raised.value) == sentence


@pytest.mark.parametrize("ranks", [[], "", " "])
def test_empty_ranks_are_rejected(ranks: list[int] | str) -> None:
    with pytest.raises(UsageError, match=r"^no rank is named; ranks are 0 to 3\.$"):
        resolve_ranks(ranks, 4)


@pytest.mark.parametrize(("ranks", "name"), [([2], "rank 2"), ([2, 2], "rank 2"), ([3, 0, 1], "ranks 0-1,3")])
def test_rank_names_agree_in_number(ranks: list[int], name: str) -> None:
    assert name_ranks(ranks) == name


@given(st.lists(st.integers(0, 40)))
def test_packed_ranks_are_unpacked_as_they_were(ranks: list[int]) -> None:
    assert unpack_ranks(pack_ranks(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (KIB, "1.00 KiB"),
        (int(9.994 * KIB), "9.99 KiB"),
        (int(9.996 * KIB), "10.0 KiB"),
        (int(99.96 * KIB), "100 KiB"),
        (999 * KIB, "999 KiB"),
        (1023 * KIB, "0.999 MiB"),
        (int(23.44 * GIB), "23.4 GiB"),
        (141 * GIB, "141 GiB"),
        (5000 * 2**50, "5000 PiB"),
        (-12 * MIB, "-12.0 MiB"),
    ],
)
def test_bytes_have_three_digits(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1000, "1000 B"), (KIB, "1 KiB"), (1536, "1.5 KiB"), (4 * MIB, "4 MiB"), (MIB + 1, "1048577 B")],
)
def test_exact_bytes_are_lossless(num_bytes: int, text: str) -> None:
    assert exact_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.254, "0.25 s"),
        (0.999, "1.0 s"),
        (2.14, "2.1 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_seconds_grow_into_minutes_and_hours(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_three_axes_are_slices_of_two() -> None:
    mesh = decode(MeshInfo, {"name": "mesh", "axes": ["pp", "dp", "tp"], "shape": [2, 2, 3], "ranks": list(range(12))})
    assert str(mesh) == "mesh: pp 2 × dp 2 × tp 3"
    assert mesh.slices() == [
        MeshSlice("pp 0", ((0, 1, 2), (3, 4, 5))),
        MeshSlice("pp 1", ((6, 7, 8), (9, 10, 11))),
    ]


def test_four_axes_name_both_outer_ones() -> None:
    mesh = MeshInfo("grid", ("a", "b", "c", "d"), (2, 3, 1, 1), tuple(range(6)))
    assert str(MeshInfo("grid", ("a",), (2,), (0, 1))) == "mesh grid: a 2"
    assert [part.place for part in mesh.slices()] == [f"a {a}, b {b}" for a in range(2) for b in range(3)]


def test_one_axis_is_a_row() -> None:
    assert MeshInfo("mesh", ("dp",), (3,), (2, 0, 1)).slices() == [MeshSlice("", ((2, 0, 1),))]


def test_page_input_changes_some_fields() -> None:
    before = MemorySetup(4, "full_shard", 4, batch=2)
    after = changed(before, {"world_size": "16", "strategy": "hybrid_shard", "activation_checkpointing": True})
    assert after == MemorySetup(16, "hybrid_shard", 4, batch=2, activation_checkpointing=True)
    assert before.mesh == {"dp": 4}
    assert after.mesh == {"replicate": 4, "shard": 4}
    assert changed(before, {}) == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"world_size": "0"}, "ranks: '0': must be an integer from 1 to 1,000,000"),
        ({"batch": "2.5"}, "samples per rank: '2.5': must be an integer"),
        ({"batch": ""}, "samples per rank: '': must be an integer"),
        ({"world_size": True}, "ranks: True: must be an integer"),
        ({"activation_checkpointing": "yes"}, "activation_checkpointing='yes': must be True or False"),
        ({"colour": 1}, "'colour' is unknown; fields are activation_checkpointing, batch, cp, cpu_offload, dtype"),
    ],
)
def test_invalid_input_is_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        changed(MemorySetup(), given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replica_size_must_divide_the_ranks() -> None:
    with pytest.raises(UsageError, match="hybrid_shard: 3 ranks per replica do not divide 8 ranks; use 4, for example"):
        _ = MemorySetup(8, "hybrid_shard", 3).mesh
    with pytest.raises(UsageError, match="16 ranks per replica exceed the 8 available"):
        _ = MemorySetup(8, "hybrid_shard", 16).mesh


def test_experts_and_a_sequence_are_shared_by_some_of_the_ranks() -> None:
    assert changed(MemorySetup(16, "full_shard"), {"ep": "4", "cp": "2"}).mesh == {"dp": 2, "ep": 4, "cp": 2}
    assert MemorySetup(4, "full_shard", cp=4, tp=1).mesh == {"dp": 1, "cp": 4}
    with pytest.raises(UsageError, match="6 ranks with ep=2 and tp=2: the number must be a multiple of 4"):
        _ = MemorySetup(6, "full_shard", ep=2, tp=2).mesh
    with pytest.raises(UsageError, match="hybrid_shard cannot be combined with cp"):
        _ = MemorySetup(8, "hybrid_shard", 4, cp=2).mesh


def test_momentum_is_a_separate_optimizer() -> None:
    assert MemorySetup(optimizer=WITH_MOMENTUM).optimizer_arguments == ("sgd", {"momentum": 0.9})
    assert MemorySetup(optimizer="adamw").optimizer_arguments == ("adamw", {})


def test_lazy_functions_are_pickled_without_their_modules() -> None:
    join = pickle.loads(pickle.dumps(LazyFunction("posixpath", "join")))
    assert join("a", "b") == "a/b"
    assert pickle.loads(pickle.dumps(HasClassName(("int",))))(3)
    assert not HasClassName(())(3)
