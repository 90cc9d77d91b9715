"""The picture of the rooms: `scripts/rooms.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("grimp")

from scripts import rooms


def test_arrows_that_a_longer_path_implies_are_left_out() -> None:
    found = {"magics": {"cluster", "engine", "errors"}, "cluster": {"engine"}, "engine": {"errors"}, "errors": set()}
    assert rooms.reduced(found) == {
        "magics": {"cluster"},
        "cluster": {"engine"},
        "engine": {"errors"},
        "errors": set(),
    }


def test_the_page_is_up_to_date() -> None:
    assert rooms.TARGET.read_text(encoding="utf-8") == rooms.render()
