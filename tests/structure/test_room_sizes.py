"""The package does not grow unseen: each room has a budget in lines of code."""

from __future__ import annotations

import tomllib

from scripts.room_sizes import BUDGETS, lines_of_code, sizes


def test_no_room_is_above_its_budget() -> None:
    budgets = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    above = {room: (count, budgets.get(room, 0)) for room, count in sizes().items() if count > budgets.get(room, 0)}
    assert not above, (
        f"more lines of code than the budget, by room: {above}. Make it with fewer, or raise the budget with "
        "`python -m scripts.room_sizes --update` in a commit that says for what."
    )


def test_lines_without_code_do_not_count() -> None:
    source = """'A module.'

# A comment.
x = 1  # one


def f():
    'Doc.'
    return (
        x
    )
"""
    assert lines_of_code(source) == 5
