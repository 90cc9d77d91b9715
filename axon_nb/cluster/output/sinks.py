"""Where labelled output goes: the running notebook cell, or a list."""

from __future__ import annotations

import sys
from typing import Any, Literal, Protocol

__all__ = ["NotebookSink", "RecordingSink", "Sink"]


class Sink(Protocol):
    """Takes what is to be shown; called on the notebook's thread."""

    def stream(self, name: Literal["stdout", "stderr"], text: str) -> None:
        """Text of a standard stream."""

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        """A mime bundle; with `update`, in place of the one of the same `display_id`."""

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output."""


class NotebookSink:
    """Publishes into the running cell; plain printing where there is no IPython."""

    def stream(self, name: Literal["stdout", "stderr"], text: str) -> None:
        """Write and flush."""
        stream = sys.stdout if name == "stdout" else sys.stderr
        stream.write(text)
        stream.flush()

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        """Publish as it is."""
        shell = _shell()
        if shell is None:
            if not update:
                print(data.get("text/plain", ""))
            return
        transient = {"display_id": display_id} if display_id else {}
        shell.display_pub.publish(data=data, metadata=metadata, transient=transient, update=update)

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output."""
        shell = _shell()
        if shell is not None:
            shell.display_pub.clear_output(wait=wait)


class RecordingSink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[tuple[str, Any]] = []
        """("stdout" or "stderr", text), ("display", (data, display_id, update)), ("clear", wait), in order."""

    def stream(self, name: Literal["stdout", "stderr"], text: str) -> None:
        """Keep."""
        self.records.append((name, text))

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        """Keep."""
        self.records.append(("display", (data, display_id, update)))

    def clear(self, *, wait: bool) -> None:
        """Keep."""
        self.records.append(("clear", wait))

    def text(self, name: str = "stdout") -> str:
        """All text of one stream."""
        return "".join(payload for kind, payload in self.records if kind == name)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
