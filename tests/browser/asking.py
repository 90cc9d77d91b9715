"""Asking for completions and help in a page, as somebody does who types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab_page import LabPage

__all__ = ["ask_until", "type_at_end"]

_LOOK_MS = 5000
_TIMES = 40


def type_at_end(page: LabPage, i: int, text: str) -> None:
    """Type at the end of the i-th cell; what was open beside the cursor is closed."""
    page.cell(i).locator(".cm-content").click()
    page.page.keyboard.press("Control+End")
    page.page.keyboard.type(text)


def ask_until(page: LabPage, i: int, ask: Callable[[], object], answer: Locator) -> None:
    """Ask at the end of the i-th cell until there is an answer: a rank is given a tenth of a second, so some are late.

    Raises:
        TimeoutError: there was none in minutes.
    """
    from playwright.sync_api import TimeoutError as TooLate

    for _ in range(_TIMES):
        type_at_end(page, i, "")
        ask()
        try:
            answer.first.wait_for(timeout=_LOOK_MS)
        except TooLate:
            continue
        return
    raise TimeoutError(f"no answer at the end of {page.cell(i).inner_text()!r}")
