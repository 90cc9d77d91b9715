"""`%timeline`: what each rank does, span by span, live while cells run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import traitlets

from axon_nb.cluster.inspection.span_feed import SpanFeed
from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.ranks import name_ranks
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.palette import OTHER, SPAN_CODES, paints_for_page
from axon_nb.widgets.timeline.page import facts_of, page_facts, timeline_bundle
from axon_nb.widgets.timeline.wire import BYTES_PER_PATCH, BYTES_PER_SPAN, pack
from axon_nb.widgets.view import View

__all__ = ["TimelineView"]

_MAX_BYTES = 48_000
"""Of one message."""
_MAX_SNAPSHOT = 30_000
"""Spans that a reloaded page gets at once: 0.9 MB. Jupyter's server lets 3 MB through in 3 s and then drops everything;
up to 1.5 MB of messages may come besides in that time."""
_SEEN_S = 12.0
_IN_FLIGHT = 2
"""Messages that no page has confirmed yet, at most: a page that falls behind gets fewer, and larger ones."""
_PATIENCE_S = 1.0
"""Messages that no page has confirmed for so long are taken for lost."""
_SIGN_OF_LIFE_S = 5.0
_LISTENS_S = 0.5
_LAST_MESSAGES = 20
"""So many at most follow each other at the end."""
_FACTS_S = 3.0
_FACTS_SHARE = 100
"""Facts are worked out so rarely that they take at most one part of so many of the time."""


class TimelineView(View):
    """Spans by rank: what its code does, and what communication is under way below; pipelines beside their ideal.

    Args:
        feed: Where spans come from.
        ranks: Rows, from the top.
        title: What is shown, such as ``In [3]``; empty: everything.
        begin: Number of the first span that belongs to it.
    """

    _esm = script("timeline")
    _css = style("timeline")

    config = traitlets.Dict().tag(sync=True)
    """What does not change: ranks, title, paints."""
    snapshot = traitlets.Bytes(b"").tag(sync=True)
    """The newest spans, for a page that opens later; made when asked for and kept empty otherwise."""

    def __init__(self, feed: SpanFeed, ranks: Sequence[int], *, title: str = "", begin: int = 0) -> None:
        self._lock = threading.Lock()  # the base class asks for the state while it starts
        self._feed = feed
        self._ranks = list(ranks)
        self._title = title
        self._begin = self._cursor = begin
        self._labels = 0
        self.reopened = False
        """Whether a page has taken it up again, after a reload."""
        self._groups: dict[str, tuple[int, ...]] = {}
        self._patched = feed.store.num_patched
        self._patches: deque[tuple[int, int, int]] = deque()
        self._restart = True
        self._heard: float | None = None
        self._num_sent = self._num_seen = self._given_up = 0
        """Messages by number: the last one sent, the last that a page has confirmed, the last that is given up."""
        self._hold_until = 0.0
        self._sent = 0.0
        self._last: tuple[Any, ...] = ()
        self._facts: dict[str, Any] = {}
        self._facts_at: tuple[Any, ...] = ()
        self._facts_due = 0.0
        self._origin_ns = time.monotonic_ns()
        self._until_ns: int | None = None
        self._beat = time.monotonic()
        self._listening = False
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        super().__init__(config={"ranks": self._ranks, "title": title, "paints": paints_for_page()})
        # Held weakly: a view that nobody has any more is not kept by its own callback.
        me = weakref.ref(self)
        self.on_msg(lambda _, message, buffers: _heard(me, message))

    @property
    def watched(self) -> bool:
        """Whether a page has shown it in the last seconds, those aside in which the kernel could hear nothing."""
        return self._heard is not None and self._beat - self._heard < _SEEN_S

    @property
    def wanted(self) -> bool:
        """Whether spans have to be fetched: a page shows it, or none ever has, as in a notebook that is executed."""
        return self._until_ns is None and (self._heard is None or self.watched)

    def pump(self) -> None:
        """Send what is new, if a page is there and keeps up; from the feed's thread."""
        self._listen()
        now = time.monotonic()
        if now - self._sent >= _PATIENCE_S:
            self._given_up = self._num_sent
        under_way = self._num_sent - max(self._num_seen, self._given_up)
        if not self.watched or under_way >= _IN_FLIGHT or now < self._hold_until:
            return
        with self._lock:
            message = self._message(now)
            if message is None:
                return
            self._sent = now
        self.send({"op": "append"}, buffers=[message])

    def _listen(self) -> None:
        """Note that the kernel's event loop runs, and so hears pages; while a cell blocks it, it does not."""
        if self._loop is None:
            self._beat = time.monotonic()
            return
        if not self._listening and time.monotonic() - self._beat > _LISTENS_S:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._listening = True
                self._loop.call_soon_threadsafe(self._hears)

    def _hears(self) -> None:
        self._beat, self._listening = time.monotonic(), False

    def finish(self) -> None:
        """What comes from now on is no part of it."""
        with self._lock:
            self._until_ns = time.monotonic_ns()
            self._facts_at, self._facts_due = (), 0.0
            messages = [self._message(time.monotonic())]
            while self._cursor < self._feed.store.end and len(messages) < _LAST_MESSAGES:
                messages.append(self._message(time.monotonic()))
        for message in messages:
            if self.watched and message is not None:
                self.send({"op": "append"}, buffers=[message])

    def table(self) -> SpanTable:
        """The spans that belong to it."""
        table = self._feed.store.table(self._begin)
        return table if self._until_ns is None else table.between(0, self._until_ns)

    def to_bundle(self) -> dict[str, str]:
        """What is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        return timeline_bundle(self.table(), self._ranks, title=self._title, focus=self._focus_ns())

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The traits for a front end; `snapshot` is made here, so that a reloaded page has what was there."""
        state = super().get_state(key=key, drop_defaults=drop_defaults)
        if key is None or key == "snapshot" or (not isinstance(key, str) and "snapshot" in key):
            with self._lock:
                if self._cursor > self._begin:
                    self.reopened = True
                    self._hold_until = time.monotonic() + _PATIENCE_S
                    table = self._feed.store.table(max(self._begin, self._cursor - _MAX_SNAPSHOT), self._cursor)
                    header = self._header(table, labels_from=0, groups_known={})
                    state["snapshot"] = pack(table, {**header, **self._facts}, origin_ns=self._origin_ns)
        return state

    def note(self, message: dict[str, Any]) -> None:
        """A page has said something; from the notebook's thread."""
        self._heard = self._beat = time.monotonic()
        if message.get("op") == "seen":
            self._num_seen = max(self._num_seen, int(message.get("number", self._num_sent)))
        elif message.get("op") == "ready":
            self._hold_until = 0.0
        elif message.get("op") == "resend":
            with self._lock:
                self._cursor, self._labels, self._groups = self._begin, 0, {}
                self._restart, self._hold_until, self._facts_at = True, 0.0, ()
                self._patches.clear()

    def _message(self, now: float) -> bytes | None:
        store = self._feed.store
        if self._is_told(now):
            return None
        fresh, self._patched = store.patches(self._patched)
        # What has not been sent yet will be sent with it.
        self._patches.extend(patch for patch in fresh if self._begin <= patch[0] < self._cursor)
        table = store.table(self._cursor, self._cursor + _MAX_BYTES // BYTES_PER_SPAN)
        extra = self._new_facts(now)
        state = self._state()
        if not (len(table) or self._patches or extra or self._restart or state != self._last):
            return None if now - self._sent < _SIGN_OF_LIFE_S else self._pack(table, extra, [])
        self._last = state
        count = min(len(self._patches), _MAX_BYTES // 4 // BYTES_PER_PATCH)
        return self._pack(table, extra, [self._patches.popleft() for _ in range(count)])

    def _state(self) -> tuple[Any, ...]:
        store = self._feed.store
        return (store.lost, store.first, self._feed.running_since, store.last_cell, self._until_ns)

    def _is_told(self, now: float) -> bool:
        """Whether there is nothing to send, as far as that can be seen at a glance."""
        store = self._feed.store
        waiting = self._restart or self._patches or self._cursor < store.end or self._patched < store.num_patched
        if waiting or self._state() != self._last or now - self._sent >= _SIGN_OF_LIFE_S:
            return False
        return self._facts_at == self._facts_of() or now < self._facts_due

    def _facts_of(self) -> tuple[Any, ...]:
        return (self._feed.store.end, self._feed.store.num_patched, *self._focus_ns())

    def _pack(self, table: SpanTable, extra: dict[str, Any], patches: list[tuple[int, int, int]]) -> bytes:
        header = {**self._header(table, labels_from=self._labels, groups_known=self._groups), **extra}
        if self._restart:
            header["restart"] = True
        labels = header.pop("labels")
        room = _MAX_BYTES - len(json.dumps(header)) - len(patches) * BYTES_PER_PATCH
        count = min(len(table), max(1, room // BYTES_PER_SPAN))
        while True:  # labels are numbered in the order of their first use: what comes later needs later ones
            needed = max([self._labels, *(table.columns["label"][:count] + 1).tolist()])
            header["labels"] = labels[: needed - self._labels]
            if count <= 1 or len(json.dumps(header["labels"])) + count * BYTES_PER_SPAN <= room:
                break
            count //= 2
        self._restart, self._labels, self._groups = False, needed, table.groups
        self._num_sent += 1
        header["number"] = self._num_sent
        self._cursor = table.first + count
        return pack(table.head(count), header, origin_ns=self._origin_ns, patches=patches)

    def _header(
        self, table: SpanTable, *, labels_from: int, groups_known: dict[str, tuple[int, ...]]
    ) -> dict[str, Any]:
        store = self._feed.store
        start, end = self._focus_ns()
        return {
            "labels": [[SPAN_CODES.get(kind, OTHER), name, group] for kind, name, group in table.labels[labels_from:]],
            "labelsFrom": labels_from,
            "groups": {
                name: name_ranks(ranks) for name, ranks in table.groups.items() if groups_known.get(name) != ranks
            },
            "oldest": max(store.first, self._begin),
            "dropped": max(0, store.first - self._begin),
            "lost": store.lost,
            "now": (time.monotonic_ns() - self._origin_ns) / 1e9,
            "focus": [(time_ns - self._origin_ns) / 1e9 if time_ns is not None else None for time_ns in (start, end)],
            "finished": self._until_ns is not None,
        }

    def _focus_ns(self) -> tuple[int | None, int | None]:
        """What a page shows by itself: the cell that runs, or the last one; a second None: until now."""
        if self._feed.running_since is not None and self._until_ns is None:
            return self._feed.running_since, None
        cell = self._feed.store.last_cell
        return (cell[1], cell[2]) if cell is not None else (None, None)

    def _new_facts(self, now: float) -> dict[str, Any]:
        at = self._facts_of()
        if now < self._facts_due or at == self._facts_at:
            return {}
        began = time.thread_time()
        self._facts_at = at
        self._facts = page_facts(facts_of(self._in_focus()), self._ranks)
        self._facts_due = now + max(_FACTS_S, _FACTS_SHARE * (time.thread_time() - began))
        return self._facts

    def _in_focus(self) -> SpanTable:
        start, end = self._focus_ns()
        if start is None:
            return self.table()
        ends = [time_ns for time_ns in (end, self._until_ns) if time_ns is not None]
        return self._feed.store.ending_after(start, self._begin).between(start, min(ends, default=None))


def _heard(me: weakref.ref[TimelineView], message: dict[str, Any]) -> None:
    view = me()
    if view is not None:
        view.note(message)
