"""`%timeline`: what each rank does, span by span, live while cells run and a page shows it.

Spans travel to the browser as bytes, a JSON header and columns, which `static/timeline/store.js` reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import traitlets
from IPython.core.interactiveshell import InteractiveShell

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.feeds import SpanFeed
from axon_nb.cluster.inspection.spans import SpanTable
from axon_nb.records.ranks import name_ranks
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.html import OTHER, SPAN_CODES, paints_for_page
from axon_nb.widgets.panel import Panel, View
from axon_nb.widgets.timeline.content import page_facts, summarize
from axon_nb.widgets.timeline.page import timeline_bundle

BYTES_PER_SPAN = 36
BYTES_PER_PATCH = 10
_MAX_BYTES = 48_000
"""Of one message."""
_MAX_SNAPSHOT = 30_000
"""Spans that a reloaded page gets at once: 0.9 MB. Jupyter's server lets 3 MB through in 3 s and then drops everything;
up to 1.5 MB of messages may follow in that time."""
_HEARTBEAT_TIMEOUT_S = 12.0
_MAX_IN_FLIGHT = 2
"""Messages that no page has acknowledged yet: a page that falls behind gets fewer, and larger ones."""
_ACK_TIMEOUT_S = 1.0
"""Messages that no page has acknowledged for this long count as lost."""
_KEEPALIVE_S = 5.0
_LOOP_CHECK_S = 0.5
_MAX_FINAL_MESSAGES = 20
"""Sent one after the other when the view finishes."""
_MIN_FACTS_INTERVAL_S = 3.0
_FACTS_INTERVAL_FACTOR = 100
"""Computing facts takes at most 1/100 of the time."""


def pack(
    table: SpanTable, header: Mapping[str, Any], *, origin_ns: int, patches: Sequence[Sequence[int]] = ()
) -> bytes:
    """Pack spans.

    Args:
        table: The spans; their numbers continue those that the browser has.
        header: Sent along; gets `first`, the number of the first span, `count`, and `patched`, the number of patches.
        origin_ns: The time that is 0 in the browser.
        patches: Facts learned since about spans that the browser has: number of the span, nanoseconds late, rank that
            was waited for.

    Returns:
        Header length (uint32) and 4 zero bytes; the header, padded to 8 bytes; then columns, little-endian: start
        (float64, seconds), length, bytes, late (float32; seconds, bytes, seconds), sequence (uint32, its low bits),
        number and late of the patches (uint32, float32), label, rank, line (uint16), stage, microbatch, by (int16),
        by of the patches (int16).
    """
    full_header = {**header, "first": table.first, "count": len(table), "patched": len(patches)}
    text = json.dumps(full_header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    columns = table.columns
    patched = np.array(patches, dtype=np.int64).reshape(-1, 3)
    parts = (
        _bytes((columns["start"] - origin_ns) / 1e9, "<f8"),
        _bytes((columns["end"] - columns["start"]) / 1e9, "<f4"),
        _bytes(columns["bytes"], "<f4"),
        _bytes(columns["late"] / 1e9, "<f4"),
        _bytes(columns["sequence"] & 0xFFFFFFFF, "<u4"),
        _bytes(patched[:, 0], "<u4"),
        _bytes(patched[:, 1] / 1e9, "<f4"),
        _bytes(columns["label"], "<u2"),
        _bytes(columns["rank"], "<u2"),
        _bytes(columns["line"].clip(0, 65535), "<u2"),
        *(_bytes(columns[name].clip(-1, 32767), "<i2") for name in ("stage", "microbatch", "by")),
        _bytes(patched[:, 2], "<i2"),
    )
    return struct.pack("<II", len(text), 0) + text + b"".join(parts)


def _bytes(column: npt.NDArray[Any], dtype: str) -> bytes:
    return column.astype(dtype).tobytes()


class TimelineView(View):
    """Spans by rank: its code above, its communication below; pipeline steps next to their ideal.

    Args:
        feed: Where spans come from.
        ranks: Rows, from the top.
        title: What is shown, such as ``In [3]``; empty: everything.
        begin: Number of the first span that belongs to it.
        since_ns: When the cell that it shows began, in nanoseconds; None: it shows all cells.
    """

    _esm = script("timeline")
    _css = style("timeline")

    tools = traitlets.Unicode(script("timeline/tools/tools")).tag(sync=True)
    """The script of features that a page loads only when they are used."""
    config = traitlets.Dict().tag(sync=True)
    """What does not change: ranks, title, paints."""
    snapshot = traitlets.Bytes(b"").tag(sync=True)
    """The newest spans, for a page that opens later; made on request and empty otherwise."""

    def __init__(
        self, feed: SpanFeed, ranks: Sequence[int], *, title: str = "", begin: int = 0, since_ns: int | None = None
    ) -> None:
        self._lock = threading.Lock()  # the base class requests the state while it starts
        self._feed = feed
        self._ranks = list(ranks)
        self._title = title
        self._begin = self._cursor = begin
        self._since_ns = since_ns
        self._num_labels = 0
        self._end: int | None = None
        """Number after the last span that belongs to it; None: it goes on."""
        self._groups: dict[str, tuple[int, ...]] = {}
        self._num_patched = feed.store.num_patched
        self._patches: deque[tuple[int, int, int]] = deque()
        self._restart = True
        self._last_heartbeat: float | None = None
        self._last_sent = self._last_acked = self._last_given_up = 0
        """Numbers of the last message sent, of the last acknowledged by a page, and of the last given up."""
        self._hold_until = 0.0
        self._sent_at = 0.0
        self._sent_state: tuple[Any, ...] = ()
        self._facts: dict[str, Any] = {}
        self._facts_state: tuple[Any, ...] = ()
        self._facts_due = 0.0
        self._origin_ns = time.monotonic_ns()
        self._until_ns: int | None = None
        self._loop_ran_at = time.monotonic()
        self._is_checking_loop = False
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        super().__init__(config={"ranks": self._ranks, "title": title, "paints": paints_for_page()})

    @property
    def watched(self) -> bool:
        """Whether a page has shown it in the last seconds, ignoring time in which the kernel was blocked."""
        return self._last_heartbeat is not None and self._loop_ran_at - self._last_heartbeat < _HEARTBEAT_TIMEOUT_S

    @property
    def wanted(self) -> bool:
        """Whether spans must be fetched: a page shows it, or none ever has, as in a notebook that is executed."""
        return self._until_ns is None and (self._last_heartbeat is None or self.watched)

    def pump(self) -> None:
        """Send what is new, if a page shows it and keeps up; from the feed's thread."""
        self._check_loop()
        now = time.monotonic()
        if now - self._sent_at >= _ACK_TIMEOUT_S:
            self._last_given_up = self._last_sent
        in_flight = self._last_sent - max(self._last_acked, self._last_given_up)
        if not self.watched or in_flight >= _MAX_IN_FLIGHT or now < self._hold_until:
            return
        with self._lock:
            message = self._next_message(now)
            if message is None:
                return
            self._sent_at = now
        self.send({"op": "append"}, buffers=[message])

    def _check_loop(self) -> None:
        """Record when the kernel's event loop runs: it receives no messages while a cell blocks it."""
        if self._loop is None:
            self._loop_ran_at = time.monotonic()
            return
        if not self._is_checking_loop and time.monotonic() - self._loop_ran_at > _LOOP_CHECK_S:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._is_checking_loop = True
                self._loop.call_soon_threadsafe(self._on_loop_run)

    def _on_loop_run(self) -> None:
        self._loop_ran_at, self._is_checking_loop = time.monotonic(), False

    def finish(self) -> None:
        """Send the last spans; later ones do not belong to the view."""
        with self._lock:
            self._until_ns, self._end = time.monotonic_ns(), self._feed.store.end
            self._facts_state, self._facts_due = (), 0.0
            messages = [self._next_message(time.monotonic())]
            while self._cursor < self._end and len(messages) < _MAX_FINAL_MESSAGES:
                messages.append(self._next_message(time.monotonic()))
            if self._cursor < self._end:  # a page that was far behind gets the newest spans instead
                messages = [self._newest()]
        for message in messages:
            if self.watched and message is not None:
                self.send({"op": "append"}, buffers=[message])

    def table(self) -> SpanTable:
        """Return the spans that belong to the view."""
        table = self._feed.store.table(self._begin)
        return table if self._until_ns is None else table.between(0, self._until_ns)

    def to_bundle(self) -> dict[str, str]:
        """Return what is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        return timeline_bundle(self.table(), self._ranks, title=self._title, focus=self._focus_ns())

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the traits for a front end; `snapshot` is made here, so that a reloaded page has the earlier spans."""
        state = super().get_state(key=key, drop_defaults=drop_defaults)
        if key is None or key == "snapshot" or (not isinstance(key, str) and "snapshot" in key):
            with self._lock:
                if self._cursor > self._begin:
                    self._hold_until = time.monotonic() + _ACK_TIMEOUT_S
                    state["snapshot"] = self._newest()
        return state

    def _newest(self) -> bytes:
        """Return the newest spans that were sent, or that belong to the view once it has ended, as one message."""
        end = self._cursor if self._end is None else self._end
        table = self._feed.store.table(max(self._begin, end - _MAX_SNAPSHOT), end)
        header = {**self._header(table, labels_from=0, sent_groups={}), **self._facts}
        header |= {"restart": True, "dropped": table.first - self._begin}
        return pack(table, header, origin_ns=self._origin_ns)

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a message from a page; on the notebook's thread."""
        self._last_heartbeat = self._loop_ran_at = time.monotonic()
        if message.get("op") == "ack":
            self._last_acked = max(self._last_acked, int(message.get("number", self._last_sent)))
        elif message.get("op") == "ready":
            self._hold_until = 0.0
        elif message.get("op") == "resend":
            if self._end is not None:  # the feed no longer pumps it
                self.send({"op": "append"}, buffers=[self._newest()])
                return
            with self._lock:
                self._cursor, self._num_labels, self._groups = self._begin, 0, {}
                self._restart, self._hold_until, self._facts_state = True, 0.0, ()
                self._patches.clear()

    def _next_message(self, now: float) -> bytes | None:
        store = self._feed.store
        if self._is_up_to_date(now):
            return None
        patches, self._num_patched = store.patches(self._num_patched)
        # Spans that have not been sent yet will be sent with their patches.
        self._patches.extend(patch for patch in patches if self._begin <= patch[0] < self._cursor)
        table = store.table(self._cursor, self._cursor + _MAX_BYTES // BYTES_PER_SPAN)
        facts = self._new_facts(now)
        state = self._state()
        if not (len(table) or self._patches or facts or self._restart or state != self._sent_state):
            return None if now - self._sent_at < _KEEPALIVE_S else self._pack(table, facts, [])
        self._sent_state = state
        count = min(len(self._patches), _MAX_BYTES // 4 // BYTES_PER_PATCH)
        return self._pack(table, facts, [self._patches.popleft() for _ in range(count)])

    def _state(self) -> tuple[Any, ...]:
        store = self._feed.store
        return (store.lost, store.first, self._feed.running_since, store.last_cell, self._until_ns)

    def _is_up_to_date(self, now: float) -> bool:
        """Whether a quick check finds nothing to send."""
        store = self._feed.store
        is_pending = self._restart or self._patches or self._cursor < store.end or self._num_patched < store.num_patched
        if is_pending or self._state() != self._sent_state or now - self._sent_at >= _KEEPALIVE_S:
            return False
        return not self._are_facts_due(now)

    def _are_facts_due(self, now: float) -> bool:
        """Whether there are new facts to compute: at once after a cell, so that numbers of an idle view are final."""
        is_idle = self._feed.running_since is None
        return (is_idle or now >= self._facts_due) and self._facts_state != self._current_facts_state()

    def _current_facts_state(self) -> tuple[Any, ...]:
        return (self._feed.store.end, self._feed.store.num_patched, *self._focus_ns())

    def _pack(self, table: SpanTable, facts: dict[str, Any], patches: list[tuple[int, int, int]]) -> bytes:
        header = {**self._header(table, labels_from=self._num_labels, sent_groups=self._groups), **facts}
        if self._restart:
            header["restart"] = True
        labels = header.pop("labels")
        room = _MAX_BYTES - len(json.dumps(header)) - len(patches) * BYTES_PER_PATCH
        count = min(len(table), max(1, room // BYTES_PER_SPAN))
        while True:  # labels are numbered in the order of their first use: later spans need later labels
            num_labels = max([self._num_labels, *(table.columns["label"][:count] + 1).tolist()])
            header["labels"] = labels[: num_labels - self._num_labels]
            if count <= 1 or len(json.dumps(header["labels"])) + count * BYTES_PER_SPAN <= room:
                break
            count //= 2
        self._restart, self._num_labels, self._groups = False, num_labels, table.groups
        self._last_sent += 1
        header["number"] = self._last_sent
        self._cursor = table.first + count
        return pack(table.head(count), header, origin_ns=self._origin_ns, patches=patches)

    def _header(self, table: SpanTable, *, labels_from: int, sent_groups: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        store = self._feed.store
        start, end = self._focus_ns()
        return {
            "labels": [[SPAN_CODES.get(kind, OTHER), name, group] for kind, name, group in table.labels[labels_from:]],
            "labelsFrom": labels_from,
            "groups": {
                name: name_ranks(ranks) for name, ranks in table.groups.items() if sent_groups.get(name) != ranks
            },
            "oldest": max(store.first, self._begin),
            "dropped": max(0, store.first - self._begin),
            "lost": store.lost,
            "now": (time.monotonic_ns() - self._origin_ns) / 1e9,
            "focus": [(time_ns - self._origin_ns) / 1e9 if time_ns is not None else None for time_ns in (start, end)],
            "finished": self._until_ns is not None,
            "cell": self._cell_name(),
        }

    def _cell_name(self) -> str:
        """Return the cell that a page shows at first, such as ``In [5]``; empty: the title, one that runs, or none."""
        last = self._feed.store.last_cell
        return last[0] if not self._title and last is not None and self._focus_ns() == last[1:] else ""

    def _focus_ns(self) -> tuple[int | None, int | None]:
        """Return what a page shows at first: start and end of the running cell (end None) or of the last one."""
        cell = self._feed.store.last_cell
        if self._since_ns is not None and (self._until_ns is None or cell is None or cell[2] <= self._since_ns):
            return self._since_ns, self._until_ns  # the last cell of the feed is an earlier one
        if self._feed.running_since is not None and self._until_ns is None:
            return self._feed.running_since, None
        return (cell[1], cell[2]) if cell is not None else (None, None)

    def _new_facts(self, now: float) -> dict[str, Any]:
        if not self._are_facts_due(now):
            return {}
        start_s = time.thread_time()
        self._facts_state = self._current_facts_state()
        start, end = self._focus_ns()
        summary = summarize(self._focused_spans(), start if end is None else None)
        self._facts = page_facts(summary, self._ranks, running=start is not None and end is None)
        self._facts_due = now + max(_MIN_FACTS_INTERVAL_S, _FACTS_INTERVAL_FACTOR * (time.thread_time() - start_s))
        return self._facts

    def _focused_spans(self) -> SpanTable:
        start, end = self._focus_ns()
        if start is None:
            return self.table()
        ends = [time_ns for time_ns in (end, self._until_ns) if time_ns is not None]
        return self._feed.store.ending_after(start, self._begin).between(start, min(ends, default=None))


class TimelinePanel(Panel):
    """A panel that the cluster's span feed keeps up to date.

    Args:
        cluster: The cluster whose ranks are shown.
        ranks: Rows, from the top.
    """

    def __init__(self, cluster: Cluster, ranks: list[int]) -> None:
        super().__init__()
        self._cluster = weakref.ref(cluster)
        self._feed = cluster.spans
        self._feed.collect(watch_s=5.0)
        # Before the first cell there is only what the ranks did to start.
        begin = 0 if self._feed.store.last_cell is not None else self._feed.store.end
        self.view: TimelineView = TimelineView(self._feed, ranks, begin=begin)
        self._picture: dict[str, str] = {}
        self._picture_end = -1

    def picture(self) -> dict[str, str]:
        """Return what the view shows now; made again only if spans were added, because it reads all of them."""
        if self._feed.store.end != self._picture_end:
            self._picture_end = self._feed.store.end
            self._picture = self.view.to_bundle()
        return self._picture

    def open(self, shell: InteractiveShell) -> None:
        """Show the panel in the running cell and feed it from now on."""
        super().open(shell)
        self._feed.open(self.view)

    def close(self) -> None:
        """Stop feeding it; what is shown stays."""
        self._feed.close(self.view)
        was_open = self._shell is not None
        super().close()
        if was_open:
            self.view.finish()

    def after_cell(self) -> None:
        """Fetch the last spans, or close the panel if the cluster has stopped."""
        cluster = self._cluster()
        if cluster is not None and cluster.running:
            self._feed.collect(timeout_s=0.3)
        else:
            self.close()
