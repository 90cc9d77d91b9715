"""What a front end asks while somebody types: completions and help for a place in a cell."""

from __future__ import annotations

import re
import time
from typing import Any

from tests.kernel.driver import Kernel

__all__ = ["completed", "inspected", "plain"]

_LIMIT_S = 60.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """A text without its colours."""
    return _COLOUR.sub("", text)


def completed(kernel: Kernel, code: str) -> list[str]:
    """The last line of `code` with each completion of its end put in."""
    content = _answer(kernel, kernel.client.complete(code, len(code)))
    before = code[: content["cursor_start"]]
    assert content["cursor_end"] == len(code)
    return [f"{before}{match}".rpartition("\n")[2] for match in content["matches"]]


def inspected(kernel: Kernel, code: str, *, detail: int = 0) -> str:
    """The help on the name at the end of `code`, as text; empty when there is none."""
    content = _answer(kernel, kernel.client.inspect(code, len(code), detail))
    return plain(content["data"].get("text/plain", "")) if content["found"] else ""


def _answer(kernel: Kernel, request: str) -> Any:
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        message = kernel.client.get_shell_msg(timeout=_LIMIT_S)
        if message["parent_header"].get("msg_id") == request:
            assert message["content"]["status"] == "ok", message["content"]
            return message["content"]
    raise TimeoutError(f"no answer after {_LIMIT_S:.0f} s")
