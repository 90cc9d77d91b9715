"""What a kernel sends back for one execute request."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

from axon_nb.cluster.cells.result import MIME_TYPE
from tests.kernel.cells.labelled import merged

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Reply:
    """Everything that one execute request gave back."""

    status: str = ""
    stdout: str = ""
    stderr: str = ""
    result: str = ""
    """text/plain of the Out[] value."""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    """As a front end shows it that has no HTML, without colours: with the text of the failure's card."""
    beside_card: str = ""
    """The traceback as it is below a card."""
    displays: list[dict[str, Any]] = field(default_factory=list)
    """Mime bundles in order; an update replaces what it updates."""
    arrivals: list[tuple[float, str, str]] = field(default_factory=list)
    """(time, message type, text) of each message."""
    seconds: float = 0.0
    record: dict[str, Any] = field(default_factory=dict)
    """The result for programs."""

    @property
    def ok(self) -> bool:
        """Whether the cell succeeded."""
        return self.status == "ok"

    def lines(self) -> list[str]:
        """The lines of stdout; a line of several ranks is one, also when it came from some of them too late for that.

        What was shown how often and when is in `stdout` and `arrivals`.
        """
        return merged(self.stdout)

    def shown(self) -> str:
        """All of its text, a traceback included."""
        return "\n".join(filter(None, [self.stdout, self.stderr, self.traceback]))

    def after_clear(self) -> str:
        """The text that a front end still shows after the last `clear_output`, tracebacks aside."""
        kinds = [kind for _, kind, _ in self.arrivals]
        start = len(kinds) - kinds[::-1].index("clear_output") if "clear_output" in kinds else 0
        return "".join(text for _, kind, text in self.arrivals[start:] if kind != "error")

    def take(self, message: dict[str, Any], ids: dict[str, int]) -> None:
        """Add one output message."""
        kind, content, text = message["msg_type"], message["content"], text_of(message)
        self.arrivals.append((time.time(), kind, text))
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + text)
        elif kind == "execute_result":
            self.result = content["data"].get("text/plain", "")
        elif kind in ("display_data", "update_display_data"):
            identity = content.get("transient", {}).get("display_id")
            if kind == "update_display_data" and identity in ids:
                self.displays[ids[identity]] = content["data"]
            else:
                if identity:
                    ids[identity] = len(self.displays)
                self.displays.append(content["data"])
        elif kind == "error":
            self.ename, self.evalue = content["ename"], content["evalue"]
            self.beside_card = _ANSI.sub("", "\n".join(content["traceback"]))
            in_card = [data["text/plain"] for data in self.displays if MIME_TYPE in data and "text/plain" in data]
            self.traceback = "\n".join([self.beside_card, *in_card[-1:]])


def belongs(message: dict[str, Any], request: str) -> bool:
    """Whether a message answers the request."""
    return bool(message["parent_header"].get("msg_id") == request)


def text_of(message: dict[str, Any]) -> str:
    """The text that a message of output shows."""
    content = message["content"]
    return str(content.get("text", content.get("data", {}).get("text/plain", "")))
