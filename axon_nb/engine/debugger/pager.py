"""Displays what IPython would page, such as `x?`, because a rank has no pager."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, TextIO

from IPython.display import display

_CELL_FILE_LINE = re.compile(r"^\S*File:\S*\s+\S*<ipython-input-.*\n?", re.MULTILINE)
"""The line that names a cell's file, which does not exist."""


class Pager:
    """Displays as text what a shell would page; ranks that show the same text share one output."""

    def __init__(self) -> None:
        self._streams: list[TextIO] = []

    def install(self, shell: Any) -> None:
        """Replace the pager of `shell`."""

        def show(shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
            text = data.get("text/plain", "") if isinstance(data, dict) else str(data)
            text = _CELL_FILE_LINE.sub("", text).rstrip()
            if self._streams:
                self._streams[-1].write(f"{text}\n")
            else:
                display({"text/plain": text}, raw=True)

        shell.set_hook("show_in_pager", show, 0)

    @contextlib.contextmanager
    def redirect(self, stream: TextIO) -> Iterator[None]:
        """Write paged text to `stream` instead."""
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.remove(stream)
