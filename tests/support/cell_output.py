"""A cell's output with a clock that the test moves, its screen, and what each rank has said of labelled output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axon_nb.cluster.output import CellOutput, RecordingSink
from axon_nb.records.protocol.cells import Omitted, stream_content


class Bench:
    """Feeds messages, flushes when that is due, and looks at what was shown."""

    def __init__(self, ranks: Sequence[int] = range(4), *, in_place: bool = True, **options: Any) -> None:
        self.now = 100.0
        self.sink = RecordingSink(in_place=in_place)
        self.output = CellOutput(list(ranks), self.sink, clock=lambda: self.now, **options)

    def print(self, rank: int, text: str, name: str = "stdout", *, omitted: Omitted | None = None) -> bool:
        """A rank's stream message; True when a flush is due sooner."""
        content = {"name": name, "text": text} if omitted is None else stream_content(name, text, omitted)
        return self.output.feed(rank, "stream", content, {})

    def show(self, rank: int, data: dict[str, Any], kind: str = "display_data", **transient: str) -> bool:
        """A rank's display."""
        return self.output.feed(rank, kind, {"data": data, "metadata": {}, "transient": transient}, {})

    def clear(self, rank: int, *, wait: bool = False) -> bool:
        """A rank's `clear_output`."""
        return self.output.feed(rank, "clear_output", {"wait": wait}, {})

    def pass_time(self, seconds: float) -> None:
        """Let time go on, flushing whenever that is due."""
        end = self.now + seconds
        while (due := self.output.next_due()) is not None and due <= end:
            self.now = max(self.now, due)
            self.output.flush()
        self.now = end

    def end(self) -> list[str]:
        """The cell is over; returns the lines that the screen shows then."""
        self.output.flush(final=True)
        return self.screen()

    def lines(self, name: str = "stdout") -> list[str]:
        """The lines of one stream."""
        return self.sink.text(name).splitlines()

    def live(self) -> list[str]:
        """The lines of all displays, as last updated."""
        shown: dict[str | None, str] = {}
        for kind, payload in self.sink.records:
            if kind == "display":
                data, display_id, _ = payload
                shown[display_id] = data["text/plain"]
        return "\n".join(filter(None, shown.values())).splitlines()

    def screen(self) -> list[str]:
        """All lines in the order in which a front end shows them: updates in place, clears carried out."""
        outputs: list[tuple[str | None, str]] = []
        clear_waits = False
        for kind, payload in self.sink.records:
            if kind == "clear":
                clear_waits = payload
                outputs = outputs if payload else []
                continue
            update = kind == "display" and payload[2]
            if clear_waits and not update:
                outputs, clear_waits = [], False
            if kind != "display":
                outputs.append((None, payload))
                continue
            data, display_id, _ = payload
            text = data.get("text/plain", "") + "\n" if data.get("text/plain") else ""
            if not update:
                outputs.append((display_id, text))
            else:
                outputs = [(own, text if own == display_id else other) for own, other in outputs]
        return "".join(text for _, text in outputs).split("\n")[:-1]


def ranks_of(line: str) -> tuple[list[int], str]:
    """The ranks that a labelled line names, and the line without its label."""
    label, _, rest = line.partition("] ")
    ranks: list[int] = []
    for part in label.split(" ", 1)[1].split(","):
        low, _, high = part.partition("-")
        ranks += range(int(low), int(high or low) + 1)
    return ranks, rest


def by_rank(text: str) -> dict[int, list[str]]:
    """The lines of each rank in their order, of text such as ``[ranks 0-1] hello``; lines without a label are left out.

    Whether equal lines of several ranks share one label, and which rank's lines come first, depends on how quick the
    ranks are; what each of them has said does not.
    """
    said: dict[int, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith(("[rank ", "[ranks ")) or "] " not in line:
            continue
        ranks, words = ranks_of(line)
        for rank in ranks:
            said.setdefault(rank, []).append(words)
    return said
