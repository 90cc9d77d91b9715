"""What the ranks print and display during one cell, as labelled output of the notebook."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from axon_nb.cluster.output.limits import Allowance, Dropped
from axon_nb.cluster.output.lines import Finished, LineAssembler
from axon_nb.cluster.output.live import LiveArea, label
from axon_nb.cluster.output.merge import Item, MergeQueue
from axon_nb.cluster.output.sinks import Sink

__all__ = ["CellOutput"]

_FIRST_S = 0.012
"""From the first message to the first flush: a window in which the other ranks' same line may come."""
_EVERY_S = 0.066
_HOLD_S = 0.05
_PARTIAL_S = 0.15
_RATE = 400_000.0
_TEXT_LIMIT = 1 << 20


class CellOutput:
    """Fed by the client's IO thread, flushed on the notebook's thread.

    Args:
        ranks: The ranks that run the cell.
        sink: Where the output goes.
        quiet: Show nothing; `text` still has what ranks printed.
        limit_bytes: Bytes of text that the cell may show.
        clock: Seconds.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        sink: Sink,
        *,
        quiet: bool = False,
        limit_bytes: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = list(ranks)
        self._sink = sink
        self._quiet = quiet
        self._limit = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._queue = MergeQueue(ranks)
        self._streams: dict[tuple[int, str], LineAssembler] = {}
        self._dropped = Dropped(ranks)
        self._allowance = Allowance(_RATE, clock())
        self._live = LiveArea(sink)
        self._fixed: list[tuple[int, str]] = []
        self._text: dict[int, list[str]] = {rank: [] for rank in ranks}
        self._text_size = dict.fromkeys(ranks, 0)
        self._accepted = 0
        self._due: float | None = None
        self._last_flush = 0.0

    def feed(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> bool:
        """Take in one message; True when a flush is now due sooner than before."""
        now = self._clock()
        with self._lock:
            if msg_type == "stream":
                self._take_text(rank, content, now)
            elif msg_type in ("execute_result", "display_data", "update_display_data"):
                self._take_display(rank, msg_type, content, now)
            elif msg_type == "clear_output":
                self._queue.put(rank, Item(("clear",), "clear", bool(content.get("wait")), 0, now))
            else:
                return False
            return self._schedule(now)

    def _schedule(self, now: float) -> bool:
        if self._quiet:
            return False
        due = max(now + _FIRST_S, self._last_flush + _EVERY_S)
        if self._due is not None and self._due <= due:
            return False
        self._due = due
        return True

    def _take_text(self, rank: int, content: dict[str, Any], now: float) -> None:
        text, name = content["text"], content["name"]
        if self._text_size[rank] < _TEXT_LIMIT:
            self._text[rank].append(text)
            self._text_size[rank] += len(text)
        if self._quiet:
            return
        if "dropped" in content:
            self._dropped.count(rank, content["dropped"]["lines"], content["dropped"]["bytes"])
        assembler = self._streams.setdefault((rank, name), LineAssembler())
        self._put_rows(rank, name, assembler.feed(text, now), now)

    def _put_rows(self, rank: int, name: str, rows: Sequence[Finished], now: float) -> None:
        for row in rows:
            if row.live:
                self._fixed.append((rank, row.text))
            else:
                self._put_line(rank, name, row.text, now)

    def _put_line(self, rank: int, name: str, line: str, now: float) -> None:
        size = len(line) + 12
        if self._accepted + size > self._limit:
            self._dropped.add_line(rank, name, line)
            return
        self._accepted += size
        self._queue.put(rank, Item((name, line), name, line, size, now))

    def _take_display(self, rank: int, msg_type: str, content: dict[str, Any], now: float) -> None:
        data, metadata = content["data"], content.get("metadata", {})
        own_id = content.get("transient", {}).get("display_id")
        display_id = f"{own_id}-rank{rank}" if own_id else None
        if set(data) == {"text/plain"} and not own_id:
            for line in data["text/plain"].split("\n"):
                self._put_line(rank, "stdout", line, now)
            return
        encoded = json.dumps([data, metadata], sort_keys=True, default=str)
        key = ("display", encoded, display_id)
        payload = (data, metadata, display_id, msg_type == "update_display_data")
        self._queue.put(rank, Item(key, "display", payload, len(encoded), now))

    def rank_done(self, rank: int) -> None:
        """The rank sends no more: its lines need not be waited for."""
        with self._lock:
            self._queue.close(rank)

    def next_due(self) -> float | None:
        """When `flush` should be called next, in the clock's seconds; None when nothing is pending."""
        return self._due

    @property
    def drained(self) -> bool:
        """Whether everything that came has been shown, unfinished lines aside."""
        return self._quiet or not self._queue

    def text(self, rank: int) -> str:
        """What a rank printed, at most 1 MiB of it."""
        return "".join(self._text[rank])

    def flush(self, *, final: bool = False) -> None:
        """Show what is due; with `final` all that is left."""
        if self._quiet:
            return
        now = self._clock()
        with self._lock:
            self._last_flush, self._due = now, None
            for (rank, name), stream in self._streams.items():
                self._put_rows(rank, name, stream.settle(now, final=final), now)
            batch = self._collect(now, final=final)
            fixed, self._fixed = self._fixed, []
            live = self._live_rows(now)
            if self._queue or any(stream.pending for stream in self._streams.values()):
                self._due = now + _EVERY_S
        self._emit(batch)
        for rank, row in fixed:
            self._live.fix(rank, row)
        if fixed or live or self._live.visible:
            self._live.show(live)
        if final:
            self._emit_dropped()

    def _collect(self, now: float, *, final: bool) -> list[tuple[list[int], Item]]:
        batch = []
        while (found := self._queue.next(now, 0.0 if final else _HOLD_S, self._may_go(now, final=final))) is not None:
            batch.append(found)
        return batch

    def _may_go(self, now: float, *, final: bool) -> Callable[[Item], bool]:
        return lambda item: final or self._allowance.take(item.size, now)

    def _live_rows(self, now: float) -> dict[int, list[str]]:
        live: dict[int, list[str]] = {}
        for (rank, _), stream in self._streams.items():
            if stream.pending and (rows := stream.live_rows(now, _PARTIAL_S)):
                live.setdefault(rank, []).extend(rows)
        return dict(sorted(live.items()))

    def _emit(self, batch: Sequence[tuple[list[int], Item]]) -> None:
        name, pieces = "", list[str]()
        for ranks, item in batch:
            if item.kind in ("stdout", "stderr"):
                if item.kind != name:
                    self._write(name, pieces)
                    name, pieces = item.kind, []
                pieces.append(f"{label(ranks)} {item.payload}\n")
                continue
            self._write(name, pieces)
            name, pieces = "", []
            if item.kind == "clear":
                self._live.reset()
                self._sink.clear(wait=item.payload)
            else:
                data, metadata, display_id, update = item.payload
                if not update:
                    self._sink.stream("stdout", f"{label(ranks)}\n")
                self._sink.display(data, metadata, display_id=display_id, update=update)
        self._write(name, pieces)

    def _write(self, name: str, pieces: Sequence[str]) -> None:
        if pieces:
            self._sink.stream("stderr" if name == "stderr" else "stdout", "".join(pieces))

    def _emit_dropped(self) -> None:
        for rank, sentence in self._dropped.notes(self._limit):
            self._sink.stream("stderr", f"{label([rank])} {sentence}\n")
        for rank, name, line in self._dropped.tail:
            self._write(name, [f"{label([rank])} {line}\n"])
        self._dropped.tail.clear()
