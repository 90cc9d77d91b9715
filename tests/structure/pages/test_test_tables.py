"""The tables of docs/tests.md are made from pytest's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.test_tables import PAGE, by_folder, read_durations, replace_table, updated

LOG = """
============ slowest durations ============
12.50s call     tests/kernel/test_a.py::test_one[x-1 of 2]
2.25s setup    tests/kernel/test_a.py::test_one[x-1 of 2]
0.25s teardown tests/kernel/test_a.py::test_one[x-1 of 2]
3.00s call     tests/unit/cluster/test_b.py::test_two
0.50s call     tests/kernel/test_a.py::test_three

(9 durations < 0.005s hidden.)
============ 3 passed in 20.00s ============
"""


def test_durations_are_summed_by_test_and_folder() -> None:
    seconds = read_durations(LOG)
    assert seconds["tests/kernel/test_a.py::test_one[x-1 of 2]"] == 15
    assert by_folder(seconds) == {"kernel": (2, 15.5), "unit": (1, 3.0)}
    with pytest.raises(ValueError, match="run pytest with `--durations 0`"):
        read_durations("3 passed")


def test_seconds_of_files_in_a_log_replace_the_known_ones() -> None:
    this, other = "tests/structure/pages/test_test_tables.py", "tests/conftest.py"
    log = f"2.00s call     {this}::test_one\n0.50s setup    {this}::test_two"
    assert updated({this: 9.0, other: 1.0, "tests/test_gone.py": 3.0}, log) == {other: 1.0, this: 2.5}


def test_table_is_replaced_in_its_place() -> None:
    page = "before\n<!-- a -->\n\nold\n\n<!-- end of a -->\nafter\n"
    assert replace_table(page, "a", ["| new |"]) == "before\n<!-- a -->\n\n| new |\n\n<!-- end of a -->\nafter\n"
    assert "durations" in replace_table(Path(PAGE).read_text(encoding="utf-8"), "durations", [])
    with pytest.raises(ValueError, match="has no place for nothing"):
        replace_table(page, "nothing", [])
