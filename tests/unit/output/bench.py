"""A cell's output with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axon_nb.cluster.output import CellOutput, RecordingSink

__all__ = ["Bench"]


class Bench:
    """A cell's output with a clock that the test moves."""

    def __init__(self, ranks: Sequence[int] = range(4), **options: Any) -> None:
        self.now = 100.0
        self.sink = RecordingSink()
        self.output = CellOutput(list(ranks), self.sink, clock=lambda: self.now, **options)

    def print(self, rank: int, text: str, name: str = "stdout") -> bool:
        return self.output.feed(rank, "stream", {"name": name, "text": text}, {})

    def show(self, rank: int, data: dict[str, Any], kind: str = "display_data", **transient: str) -> bool:
        return self.output.feed(rank, kind, {"data": data, "metadata": {}, "transient": transient}, {})

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.output.next_due()) is not None and due <= end:
            self.now = max(self.now, due)
            self.output.flush()
        self.now = end

    def end(self) -> list[str]:
        self.output.flush(final=True)
        return self.sink.text().splitlines()

    def live(self) -> list[str]:
        """The live display's lines, as last updated."""
        shown: dict[str | None, str] = {}
        for kind, payload in self.sink.records:
            if kind == "display":
                data, display_id, _ = payload
                shown[display_id] = data["text/plain"]
        return "\n".join(shown.values()).splitlines()
