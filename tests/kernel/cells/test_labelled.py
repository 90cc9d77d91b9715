"""Lines that arrive too late to be merged read the same as those in time, and nothing else changes."""

from __future__ import annotations

import pytest

from tests.kernel.cells.labelled import merged, ranks_of


@pytest.mark.parametrize(
    ("shown", "lines"),
    [
        ("[ranks 0-1] a\n[rank 3] a\n[rank 2] a\n", ["[ranks 0-3] a"]),
        ("[rank 0] a\n[rank 0] b\n[rank 1] a\n[rank 1] b\n", ["[ranks 0-1] a", "[ranks 0-1] b"]),
        ("[rank 0] a\n[rank 0] a\n[rank 1] a\n[rank 1] a\n", ["[ranks 0-1] a", "[ranks 0-1] a"]),
        ("[rank 0] a\n[rank 0] a\n[rank 1] a\n", ["[ranks 0-1] a", "[rank 0] a"]),
        ("[rank 0] a\n[ranks 0-1] b\n[rank 1] a\n", ["[rank 0] a", "[ranks 0-1] b", "[rank 1] a"]),
        ("[rank 0] a\nthe notebook's\n[rank 1] a\n", ["[rank 0] a", "the notebook's", "[rank 1] a"]),
        ("[rank 0] a\n         b\n[rank 1] a\n         b\n[rank 2] a\n", ["[ranks 0-1] a", f"{'':12}b", "[rank 2] a"]),
        ("[ranks 0,2]\n[rank 1]\n[rank 3] \n", ["[ranks 0-2]", "[rank 3] "]),
        ("", []),
        ("\n[rank 0\n", ["", "[rank 0"]),
    ],
)
def test_late_lines_of_several_ranks_are_merged(shown: str, lines: list[str]) -> None:
    assert merged(shown) == lines
    assert merged("\n".join(lines)) == lines


def test_ranks_of_a_line() -> None:
    assert ranks_of("[ranks 0,2-4] [rank 9] text") == {0, 2, 3, 4}
    assert ranks_of("[rank 12]") == {12}
    assert ranks_of(" [rank 1] text") == set()
