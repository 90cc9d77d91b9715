"""`x?` and whatever else IPython pages: on a rank it is printed, as there is no pager behind it."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["install"]


def install(shell: Any) -> None:
    """Have `shell` print what it would page; ranks that print the same are shown once."""

    def show(shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
        text = data.get("text/plain", "") if isinstance(data, dict) else str(data)
        sys.stdout.write(f"{text.rstrip()}\n")

    shell.set_hook("show_in_pager", show, 0)
