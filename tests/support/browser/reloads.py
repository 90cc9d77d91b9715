"""Reloads of a page while a cell runs: the views have to come back, on a busy machine not with the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.browser.lab_page import LabPage

RELOADS = 3
LIMIT_S = 30.0


def reload_until_shown(page: LabPage, *selectors: str) -> None:
    """Load the page again until all of these are visible, three times at most.

    Where the kernel or the page was late, one reload is not enough. ipywidgets waits 4 s for the states of its widgets,
    then gives up until the cell is over; anywidget gives up on a view that has not started within 2 s.
    """
    missing: list[str] = []
    for _ in range(RELOADS):
        page.reload()
        missing = [selector for selector in selectors if not page.is_shown(selector, limit=LIMIT_S)]
        if not missing:
            return
    raise AssertionError(f"not shown within {LIMIT_S:.0f} s of any of {RELOADS} reloads: {', '.join(missing)}")
