"""Sends what is due to the sink: labels in front, streams in as few pieces as order allows, bars in their place."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.cluster.output.displays import Bundle
from axon_nb.cluster.output.live_area import LiveArea, LiveRow
from axon_nb.cluster.output.merge import Choice
from axon_nb.cluster.output.sinks import Sink, StreamName, label, labelled

__all__ = ["Printer"]

_MAX_PIECES = 20
"""Pieces in one flush: Jupyter's server counts messages, too. With more, the streams are no longer interleaved."""


class Printer:
    """Knows how output looks; keeps no state between two calls but that of the live area."""

    def __init__(self, sink: Sink, live: LiveArea) -> None:
        self._sink = sink
        self._live = live
        self._pieces: list[tuple[StreamName, list[str]]] = []
        self._num_sent = 0
        self._first_order = 0

    def clear(self, ranks: Sequence[int], *, wait: bool) -> None:
        """Clear the cell's output, as `ranks` asked."""
        self._live.cleared(ranks)
        self._sink.clear(wait=wait)

    def print(self, batch: Sequence[Choice], rows: Sequence[LiveRow], now: float) -> None:
        """Show items in order, the live area where its rows began.

        Args:
            batch: What is due.
            rows: What is live now.
            now: The time, in seconds.
        """
        self._num_sent = 0
        begins_at = self._live.begins_at(rows)
        bars = False
        for ranks, item, order in batch:
            if bars and item.kind != "bar":
                self._send()
                self._live.show(self._live.members(rows), now)
            if begins_at is not None and order > begins_at:
                self._send()
                self._live.show(self._live.in_turn(rows, order), now)
                begins_at = self._live.begins_at(rows)
            bars = item.kind == "bar"
            if bars:
                self._send()
                self._live.fix(ranks, item.payload)
            elif item.kind == "display":
                self._print_display(ranks, item.payload, order)
            else:
                name: StreamName = "stderr" if item.kind == "stderr" else "stdout"
                self._write(name, labelled(ranks, item.payload), order)
        self._send()

    def _print_display(self, ranks: Sequence[int], bundle: Bundle, order: int) -> None:
        if not bundle.update:
            self._write("stdout", f"{label(ranks)}\n", order)
            self._send()
        self._sink.display(bundle.data, bundle.metadata, display_id=bundle.display_id, update=bundle.update)

    def _write(self, name: StreamName, text: str, order: int) -> None:
        if not self._pieces:
            self._first_order = order
        if not self._pieces or self._pieces[-1][0] != name:
            self._pieces.append((name, []))
        self._pieces[-1][1].append(text)

    def _send(self) -> None:
        room = max(2, _MAX_PIECES - self._num_sent)
        if len(self._pieces) > room:
            rest = self._pieces[room - 2 :]
            self._pieces[room - 2 :] = [
                (name, [text for other, texts in rest if other == name for text in texts])
                for name in (rest[0][0], rest[1][0])
            ]
        for name, texts in self._pieces:
            self._sink.stream(name, "".join(texts))
        if self._pieces:
            self._num_sent += len(self._pieces)
            self._live.passed(self._first_order)
            self._pieces = []
