"""Sets of ranks as text: formatted compactly, parsed with tolerance for blanks and duplicates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.errors import UsageError
from axon_nb.records.ranks import format_ranks, name_ranks, pack_ranks, parse_ranks, resolve_ranks, unpack_ranks


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
