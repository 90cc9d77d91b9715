"""The picture of the rooms: `scripts/rooms.py`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.fixture
def rooms() -> Any:
    """The script, which needs grimp."""
    pytest.importorskip("grimp")
    return importlib.import_module("scripts.rooms")


def test_arrows_that_a_longer_path_implies_are_left_out(rooms: Any) -> None:
    found = {"magics": {"cluster", "engine", "errors"}, "cluster": {"engine"}, "engine": {"errors"}, "errors": set()}
    assert rooms.reduced(found) == {
        "magics": {"cluster"},
        "cluster": {"engine"},
        "engine": {"errors"},
        "errors": set(),
    }


def test_the_page_is_up_to_date(rooms: Any) -> None:
    assert rooms.TARGET.read_text(encoding="utf-8") == rooms.render()
