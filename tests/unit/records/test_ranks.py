"""Sets of ranks as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.errors import UsageError
from axon_nb.records.ranks import format_ranks, parse_ranks


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("0", [0]),
        ("3,1", [1, 3]),
        ("0,2-3", [0, 2, 3]),
        ("0-3", [0, 1, 2, 3]),
        (":2", [0, 1]),
        ("2:", [2, 3]),
        ("-1", [3]),
        ("all", [0, 1, 2, 3]),
        ("even", [0, 2]),
        ("odd", [1, 3]),
        ("1,1, 1", [1]),
    ],
)
def test_parse(spec: str, ranks: list[int]) -> None:
    assert parse_ranks(spec, 4) == ranks


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("7", "rank 7 of 4 does not exist: ranks are 0 to 3."),
        ("2-9", "rank 9 of 4 does not exist"),
        ("-5", "rank -5 of 4 does not exist"),
        ("x", "'x' is no rank; write ranks as in 0,2-3."),
        ("", "'' is no rank"),
        ("3-1", "runs backwards; write 1-3."),
        ("1:2:3:4", "is no rank"),
    ],
)
def test_errors(spec: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence.replace(".", r"\.")):
        parse_ranks(spec, 4)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_round_trip(ranks: set[int]) -> None:
    assert parse_ranks(format_ranks(ranks), 41) == sorted(ranks)
