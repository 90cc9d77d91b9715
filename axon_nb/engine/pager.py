"""`x?` and whatever else IPython pages: on a rank it is shown, as there is no pager behind it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, TextIO

from IPython.display import display

__all__ = ["install_pager", "written_to"]

_CELLS_FILE = re.compile(r"^\S*File:\S*\s+\S*ipykernel_\d+/\S*\n?", re.MULTILINE)
"""The line that names the file of a cell: there is none, and its name is another on each rank."""

_streams: list[TextIO] = []


@contextlib.contextmanager
def written_to(stream: TextIO) -> Iterator[None]:
    """What is paged meanwhile goes to `stream`."""
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.remove(stream)


def install_pager(shell: Any) -> None:
    """Have `shell` display what it would page, as text: ranks that show the same share one."""

    def show(shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
        text = data.get("text/plain", "") if isinstance(data, dict) else str(data)
        text = _CELLS_FILE.sub("", text).rstrip()
        if _streams:
            _streams[-1].write(f"{text}\n")
        else:
            display({"text/plain": text}, raw=True)

    shell.set_hook("show_in_pager", show, 0)
