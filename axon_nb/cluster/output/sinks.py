"""Sinks of labelled output, such as the running notebook cell, and the labels: ``[rank 2]``, ``[ranks 0,2-3]``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from axon_nb.records.environment import SESSION_NAME
from axon_nb.records.ranks import name_ranks

StreamName: TypeAlias = Literal["stdout", "stderr"]


class Sink(Protocol):
    """Shows output; called on the notebook's thread.

    A sink that cannot update what it has shown has an attribute ``in_place = False``. Progress bars are then shown as
    lines when they are finished, and the last update of a display when its rank is.
    """

    def stream(self, name: StreamName, text: str) -> None:
        """Show text of a standard stream."""

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        """Show a mime bundle; with `update`, replace the one with the same `display_id`."""

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output."""


def is_in_place(sink: Sink) -> bool:
    """Return whether the sink can update what it has shown."""
    return bool(getattr(sink, "in_place", True))


class NotebookSink:
    """Publishes to the running cell; prints if there is no notebook."""

    @property
    def in_place(self) -> bool:
        """Whether a kernel shows the output to a page that updates it; scripts and terminals only print."""
        shell = _kernel_shell()
        return shell is not None and not _runs_on_the_server(shell.kernel)

    def stream(self, name: StreamName, text: str) -> None:
        """Write and flush."""
        stream = sys.stdout if name == "stdout" else sys.stderr
        try:
            stream.write(text)
        except UnicodeEncodeError as error:  # a terminal or file that is not UTF-8
            stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        stream.flush()

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        """Publish the bundle unchanged."""
        shell = _kernel_shell()
        if shell is not None:
            transient = {"display_id": display_id} if display_id else {}
            shell.display_pub.publish(data=data, metadata=metadata, transient=transient, update=update)
        elif not update and (publisher := _own_publisher()) is not None:
            publisher.publish(data=data, metadata=metadata)
        elif not update and (text := data.get("text/plain")):
            self.stream("stdout", f"{text}\n")

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output, if there is a notebook."""
        shell = _kernel_shell()
        if shell is not None:
            shell.display_pub.clear_output(wait=wait)


class RecordingSink:
    """Records output in a list.

    Args:
        in_place: Whether to act as a sink that can update what it has shown.
    """

    def __init__(self, *, in_place: bool = True) -> None:
        self.in_place = in_place
        self.records: list[tuple[str, Any]] = []
        """("stdout" or "stderr", text), ("display", (data, display_id, update)), ("clear", wait), in order."""

    def stream(self, name: StreamName, text: str) -> None:
        """Record the text."""
        self.records.append((name, text))

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        """Record the bundle."""
        self.records.append(("display", (data, display_id, update)))

    def clear(self, *, wait: bool) -> None:
        """Record the clear."""
        self.records.append(("clear", wait))

    def text(self, name: str = "stdout") -> str:
        """Return all text of one stream."""
        return "".join(payload for kind, payload in self.records if kind == name)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _kernel_shell() -> Any:
    shell = _shell()
    return shell if getattr(shell, "kernel", None) is not None else None


def _runs_on_the_server(kernel: Any) -> bool:
    """Whether Jupyter's server itself sent the cell, as with jupyter-server-nbmodel, which ignores updates.

    Ids of messages that Python sends hold its process, and a session's name says that a server started the kernel.
    """
    if not SESSION_NAME.get():
        return False
    sender = str(kernel.get_parent("shell").get("header", {}).get("msg_id", "")).split("_")
    return sender[1:2] == [str(os.getppid())]


def _own_publisher() -> Any:
    """Return what shows displays in a shell without a kernel that has its own, such as ploomber-engine's."""
    publisher = getattr(_shell(), "display_pub", None)
    return None if type(publisher).__module__.startswith(("IPython.", "builtins")) else publisher


def label(ranks: Sequence[int]) -> str:
    """Return a label: ``[rank 2]`` or ``[ranks 0-3]``."""
    return _label(tuple(ranks))


@functools.lru_cache(maxsize=256)
def _label(ranks: tuple[int, ...]) -> str:
    return f"[{name_ranks(ranks)}]"


def labelled(ranks: Sequence[int], text: str) -> str:
    """Return text with its label and a final newline; further lines are indented, so that tables stay aligned."""
    head = label(ranks)
    if "\n" in text:
        text = text.replace("\n", "\n" + " " * (len(head) + 1))
    return f"{head} {text}\n"


def num_bytes(text: str) -> int:
    """Return the size in UTF-8, in bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def valid_text(text: object) -> str:
    """Return text that can be encoded: lone surrogates become question marks."""
    text = text if isinstance(text, str) else str(text)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
