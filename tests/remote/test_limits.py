"""Replies of tools are cut to a size, and stay JSON that says so."""

from __future__ import annotations

import json

import pytest

from axon_nb.remote.tools import within

LARGE = {
    "verdict": "Waiting for rank 1",
    "ranks": [{"rank": rank, "state": "waiting in all_reduce " * 5} for rank in range(1024)],
    "text": "\n".join(f"line {number}" for number in range(5000)),
}


def test_small_reply_stays_as_it_is() -> None:
    assert within({"verdict": "x"}, 500) == {"verdict": "x"}


@pytest.mark.parametrize("characters", [500, 2000, 8000, 50_000])
def test_large_reply_is_cut_and_says_so(characters: int) -> None:
    cut = within(LARGE, characters)
    assert len(json.dumps(cut)) <= characters
    assert cut["cut"] is True
    assert cut["verdict"] == LARGE["verdict"]
    assert cut["ranks"][0]["rank"] == 0
    assert cut["text"].endswith("line 4999"), "the end of a text says more than its start"


def test_reply_of_many_parts_names_them() -> None:
    assert within({f"key{number}": "x" * 100 for number in range(8)}, 200) == {
        "cut": True,
        "keys": [f"key{number}" for number in range(8)],
    }
