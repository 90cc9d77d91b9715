"""What a front end asks while somebody types: completions and help for a place in a cell.

A rank has a moment to answer; on a busy machine it may be late, and what was known of it is answered instead. So tests
ask until the answer is the one expected, as somebody who types does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.support.kernel import Kernel
from tests.support.processes import until

if TYPE_CHECKING:
    from tests.support.browser.lab_page import LabPage


_LIMIT_S = 100.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """A text without its colours."""
    return _COLOUR.sub("", text)


def completed(kernel: Kernel, code: str) -> list[str]:
    """The last line of `code` with each completion of its end put in, as of one answer."""
    content = _answer(kernel, kernel.client.complete(code, len(code)))
    before = code[: content["cursor_start"]]
    assert content["cursor_end"] == len(code)
    return [f"{before}{match}".rpartition("\n")[2] for match in content["matches"]]


def expect_completed(kernel: Kernel, code: str, *expected: str) -> None:
    """Ask until the last line of `code` is completed to just these."""
    found: list[list[str]] = []

    def right() -> bool:
        found.append(completed(kernel, code))
        return found[-1] == list(expected)

    assert until(right, timeout=_LIMIT_S), found[-1]


def help_on(kernel: Kernel, code: str, detail: int = 0) -> dict[str, Any]:
    """The help on the name at the end of `code`, as of one answer."""
    data: dict[str, Any] = _answer(kernel, kernel.client.inspect(code, len(code), detail))["data"]
    return data


def expect_help(kernel: Kernel, code: str, *expected: str, detail: int = 0) -> None:
    """Ask until the help on the name at the end of `code` holds all these texts."""
    found: list[str] = []

    def right() -> bool:
        found.append(plain(help_on(kernel, code, detail).get("text/plain", "")))
        return all(text in found[-1] for text in expected)

    assert until(right, timeout=_LIMIT_S), found[-1]


def _answer(kernel: Kernel, request: str) -> Any:
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        message = kernel.client.get_shell_msg(timeout=_LIMIT_S)
        if message["parent_header"].get("msg_id") == request:
            assert message["content"]["status"] == "ok", message["content"]
            return message["content"]
    raise TimeoutError(f"no answer after {_LIMIT_S:.0f} s")


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
