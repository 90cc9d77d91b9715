"""Sends output to the sink: with labels, streams in as few pieces as their order permits, and bars in the live area."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.cluster.output.displays import Bundle
from axon_nb.cluster.output.live_area import LiveArea, LiveRow
from axon_nb.cluster.output.merge import Choice
from axon_nb.cluster.output.sinks import Sink, StreamName, label, labelled

_MAX_PIECES = 20
"""Maximum number of pieces in one flush, because Jupyter's server limits messages, too.

With more pieces, stdout and stderr are no longer interleaved.
"""


class Printer:
    """Formats output; keeps no state between calls except that of the live area."""

    def __init__(self, sink: Sink, live: LiveArea) -> None:
        self._sink = sink
        self._live = live
        self._pieces: list[tuple[StreamName, list[str]]] = []
        self._num_sent = 0
        self._first_order = 0

    def clear(self, ranks: Sequence[int], *, wait: bool) -> None:
        """Clear the cell's output on behalf of `ranks`."""
        self._live.clear(ranks)
        self._sink.clear(wait=wait)

    def print(self, batch: Sequence[Choice], rows: Sequence[LiveRow], now: float) -> None:
        """Show items in order, with the live area where its first row started.

        Args:
            batch: The items to show.
            rows: The live rows.
            now: The time in seconds.
        """
        self._num_sent = 0
        live_order = self._live.next_row_order(rows)
        bars = False
        for ranks, item, order in batch:
            if bars and item.kind != "bar":
                self._send()
                self._live.show(self._live.members(rows), now)
            if live_order is not None and order > live_order:
                self._send()
                self._live.show(self._live.showable(rows, order), now)
                live_order = self._live.next_row_order(rows)
            bars = item.kind == "bar"
            if bars:
                self._send()
                self._live.finish(ranks, item.payload)
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
        num_left = max(2, _MAX_PIECES - self._num_sent)
        if len(self._pieces) > num_left:
            rest = self._pieces[num_left - 2 :]
            self._pieces[num_left - 2 :] = [
                (name, [text for other, texts in rest if other == name for text in texts])
                for name in (rest[0][0], rest[1][0])
            ]
        for name, texts in self._pieces:
            self._sink.stream(name, "".join(texts))
        if self._pieces:
            self._num_sent += len(self._pieces)
            self._live.output_shown(self._first_order)
            self._pieces = []
