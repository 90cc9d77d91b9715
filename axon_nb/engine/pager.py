"""`x?` and whatever else IPython pages: on a rank it is shown, as there is no pager behind it."""

from __future__ import annotations

from typing import Any

from IPython.display import display

__all__ = ["install"]


def install(shell: Any) -> None:
    """Have `shell` display what it would page, as text: ranks that show the same share one."""

    def show(shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
        text = data.get("text/plain", "") if isinstance(data, dict) else str(data)
        display({"text/plain": text.rstrip()}, raw=True)

    shell.set_hook("show_in_pager", show, 0)
