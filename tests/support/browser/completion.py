"""Asks for completions and help in a page by typing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.browser.lab_page import LabPage

_LOOK_S = 5.0
_TIMES = 40


def type_at_end(page: LabPage, i: int, text: str) -> None:
    """Type at the end of the i-th cell; what was open beside the cursor is closed."""
    page.cell(i).locator(".cm-content").click()
    page.page.keyboard.press("Control+End")
    page.page.keyboard.type(text)


def ask_until(page: LabPage, i: int, ask: Callable[[], object], answer: str) -> None:
    """Ask at the end of the i-th cell until there is an answer: a rank is given a tenth of a second, so some are late.

    Args:
        page: The page.
        i: Number of the cell.
        ask: Asks, such as by a key.
        answer: Selector of what is shown then.

    Raises:
        TimeoutError: nothing was shown in minutes.
    """
    for _ in range(_TIMES):
        type_at_end(page, i, "")
        ask()
        if page.is_shown(answer, limit=_LOOK_S):
            return
    raise TimeoutError(f"no answer at the end of {page.cell(i).inner_text()!r}")
