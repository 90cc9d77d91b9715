"""Sends and receives: matches messages with receives, and moves them piece by piece.

Messages from one rank to another arrive in the order in which they were sent. A message that arrives before its receive
is kept in this process, so that it does not block messages with other tags. A thread that waits moves all open messages
of this rank; a helper thread moves those that no thread waits for.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from axon_nb.comm.errors import TensorMismatchError
from axon_nb.comm.shared_memory.segment import futex
from axon_nb.comm.shared_memory.segment.memory import WORD, Head, InRing, OutRing
from axon_nb.comm.shared_memory.segment.pages import GroupLeftError, dtype_name
from axon_nb.comm.shared_memory.segment.progress import SLICE_S, Progress
from axon_nb.comm.shared_memory.work import SharedWork

ANY = -1
"""As the source of a receive: whoever sends first."""
_HEAD_START_S = 0.002
"""How long the helper leaves new messages to the thread that started them, which may be about to wait for them."""
_IDLE_S = 3600.0


class Send(Struct, eq=False):
    """A message that this rank sends."""

    work: SharedWork
    address: int
    size: int
    dtype: int
    tag: int
    line: int
    number: int
    done: int = 0
    error: BaseException | None = None


class Receive(Struct, eq=False):
    """A receive for which no message has arrived."""

    work: SharedWork
    address: int
    size: int
    dtype: int
    source: int
    tag: int
    finish: Callable[[], None] | None
    """Copies a received message to its destination; None: it is already there."""

    def fits(self, tag: int, source: int) -> bool:
        """Whether it is for messages with this tag from this rank."""
        return self.tag == tag and self.source in (ANY, source)

    def accepts(self, head: Head) -> bool:
        """Whether it has room for a message, and for its dtype."""
        return head.total <= self.size and head.dtype == self.dtype


class Arrival(Struct, eq=False):
    """A message that is arriving, or has arrived before its receive."""

    source: int
    head: Head
    """Of its first piece."""
    receive: Receive | None
    kept: Any = None
    """Memory of this process, for a message that arrived before its receive."""
    done: int = 0

    def target(self) -> int:
        """Address for the next piece; 0: discard it, because the receive does not accept the message."""
        if self.kept is not None:
            return ctypes.addressof(self.kept) + self.done
        assert self.receive is not None
        return self.receive.address + self.done if self.receive.accepts(self.head) else 0


def refusal(source: int, target: int, line: int, *, sent: tuple[int, int], taken: tuple[int, int]) -> str:
    """Return why a message was not received.

    Args:
        source: Global rank of the sender.
        target: The receiver's target.
        line: Line of the cell that sends; 0: unknown.
        sent: Bytes of the message, and the number of its dtype.
        taken: What the receiver expects.
    """
    place = f"send at line {line}" if line else "send"
    ends = f"rank {source} sends {{}}, but rank {target} receives into {{}}; "
    if sent[1] != taken[1]:
        ends += "both tensors must have the same dtype."
        return f"{place}: {ends.format(dtype_name(sent[1]), dtype_name(taken[1]))}"
    ends += "the receiver's tensor must be as large as the sender's."
    return f"{place}: {ends.format(f'{sent[0]:,} bytes', f'{taken[0]:,} bytes')}"


class Messages:
    """The messages of a group on this rank.

    Args:
        progress: The group's control pages.
        name: Name of the helper thread.
        timeout_s: Seconds that a wait for a message may take.
        leave: Called with an error after which the group is unusable.
    """

    def __init__(self, progress: Progress, name: str, timeout_s: float, leave: Callable[[BaseException], None]) -> None:
        self._progress, self._name, self._timeout_s, self.leave = progress, name, timeout_s, leave
        memory, rank = progress.memory, progress.rank
        self._peers = range(progress.size)
        self._out = [OutRing(memory, rank, peer) for peer in self._peers]
        self._in = [InRing(memory, peer, rank) for peer in self._peers]
        self._lock = threading.RLock()
        self._sends: list[deque[Send]] = [deque() for _ in self._peers]
        self._sent = [0 for _ in self._peers]
        self._receives: list[Receive] = []
        self._arriving: list[Arrival | None] = [None for _ in self._peers]
        self._kept: list[Arrival] = []
        self._helper: threading.Thread | None = None
        self._kick = ctypes.c_uint64(0)
        self._idle = False
        self._closed = False
        self.checked_at = 0.0
        """When the helper thread last checked which ranks are dead."""

    def send(self, work: SharedWork, address: int, size: int, *, dtype: int, peer: int, tag: int, line: int) -> None:
        """Start a send; it completes when the message is in the ring."""
        with self._lock:
            try:
                self._raise_if_left()
                self._sent[peer] += 1
                self._sends[peer].append(Send(work, address, size, dtype, tag, line, self._sent[peer]))
                self._push(peer)
            except BaseException as error:
                self.leave(error)  # before another thread moves what an interrupt left half-done
                raise

    def receive(self, item: Receive) -> None:
        """Start a receive."""
        with self._lock:
            try:
                self._raise_if_left()
                self._accept(item)
            except BaseException as error:
                self.leave(error)
                raise

    def _raise_if_left(self) -> None:
        if self._progress.left:
            raise GroupLeftError(self._progress.left)

    def _accept(self, item: Receive) -> None:
        for arrival in self._kept:
            if arrival.receive is None and item.fits(arrival.head.tag, arrival.source):
                arrival.receive = item
                if arrival.done >= arrival.head.total:
                    self._deliver(arrival)
                return
        self._receives.append(item)
        for peer in self._peers if item.source == ANY else (item.source,):
            self._pull(peer)

    def _deliver(self, arrival: Arrival) -> None:
        """Complete a receive whose message has arrived."""
        item, head, source = arrival.receive, arrival.head, arrival.source
        assert item is not None
        if arrival.kept is not None:
            self._kept.remove(arrival)
        item.work.source = source
        if not item.accepts(head):
            self._in[source].refuse(head.number, item.size, item.dtype)
            sent, taken = (head.total, head.dtype), (item.size, item.dtype)
            item.work.finish(self._refusal(source, self._progress.rank, head.line, sent=sent, taken=taken))
            return
        if arrival.kept is not None:
            futex.copy(item.address, ctypes.addressof(arrival.kept), head.total)
        if item.finish is not None:
            item.finish()
        item.work.finish()

    def _refusal(self, source: int, target: int, line: int, **sizes: tuple[int, int]) -> TensorMismatchError:
        members = self._progress.members
        return TensorMismatchError(refusal(members[source], members[target], line, **sizes))

    def _push(self, peer: int) -> None:
        """Write as much as fits into the ring to `peer`; the caller holds the lock."""
        queue, ring = self._sends[peer], self._out[peer]
        while queue and ring.room():
            item = queue[0]
            # Read before the piece is written: a send of one piece succeeds, however fast the receiver refuses it.
            number, size, dtype = ring.refused()
            if number == item.number:  # send the rest too: the receiver expects it
                sent, taken = (item.size, item.dtype), (size, dtype)
                item.error = self._refusal(self._progress.rank, peer, item.line, sent=sent, taken=taken)
            head = Head(item.tag, item.size, item.done, item.number, item.line, item.dtype)
            item.done += ring.put(head, item.address + item.done)
            if item.done >= item.size:
                queue.popleft()
                item.work.finish(item.error)

    def _pull(self, peer: int) -> None:
        """Read everything from the ring from `peer`; the caller holds the lock."""
        ring = self._in[peer]
        while (head := ring.head()) is not None:
            arrival = self._arriving[peer]
            if arrival is None:
                arrival = self._arriving[peer] = self._begin(head, peer)
            arrival.done += ring.take(head, arrival.target())
            if arrival.done >= head.total:
                self._arriving[peer] = None
                if arrival.receive is not None:
                    self._deliver(arrival)

    def _begin(self, head: Head, peer: int) -> Arrival:
        for item in self._receives:
            if item.fits(head.tag, peer):
                self._receives.remove(item)
                if not item.accepts(head):
                    self._in[peer].refuse(head.number, item.size, item.dtype)
                return Arrival(peer, head, item)
        arrival = Arrival(peer, head, None, kept=(ctypes.c_char * max(1, head.total))())
        self._kept.append(arrival)
        return arrival

    def _advance(self, is_done: Callable[[], bool]) -> tuple[list[tuple[int, int]], list[int]]:
        """Move all messages; return what to sleep on and which ranks to wait for, empty if nothing is open."""
        with self._lock:
            try:
                if not is_done():
                    self._raise_if_left()
                return self._move()
            except BaseException as error:
                self.leave(error)
                raise

    def _move(self) -> tuple[list[tuple[int, int]], list[int]]:
        words, awaited = [], []
        for peer in self._peers:
            seen = self._in[peer].sent()
            if self._is_wanted(peer):
                self._pull(peer)
                if self._is_wanted(peer):
                    words.append((self._in[peer].bell, seen))
                    if self._is_wanted(peer, ()):
                        awaited.append(peer)
            seen = self._out[peer].taken()
            if self._sends[peer]:
                self._push(peer)
                if self._sends[peer]:
                    words.append((self._out[peer].bell, seen))
                    awaited.append(peer)
        return words, awaited

    def _is_wanted(self, peer: int, others: tuple[int, ...] = (ANY,)) -> bool:
        """Whether a receive waits for `peer`, or for a source in `others`."""
        arrival = self._arriving[peer]
        if arrival is not None and arrival.receive is not None:
            return True
        return any(item.source == peer or item.source in others for item in self._receives)

    def drive(self, work: SharedWork, deadline: float) -> None:
        """Move messages until `work` is done.

        Raises:
            GroupLeftError: a rank left the group or died.
            SharedMemoryTimeoutError: the group's timeout expired.
        """
        if not work.end:  # a wait may come in slices
            work.checked_at = time.monotonic()
            work.end = work.checked_at + self._timeout_s
        try:
            while (words := self._step(work.end, work, work.is_completed)) and time.monotonic() <= deadline:
                if not self._has_changed(words):
                    self._sleep(words, SLICE_S)
        except BaseException as error:
            self.fail(error)
            raise

    def _step(
        self, end: float, wait: SharedWork | Messages, is_done: Callable[[], bool] = lambda: False
    ) -> list[tuple[int, int]]:
        """Move all messages; return what to sleep on, empty if there is nothing to wait for."""
        words, awaited = self._advance(is_done)
        if words and not is_done():
            try:
                from_any = any(item.source == ANY for item in self._receives)
                wait.checked_at = self._progress.check_wait(awaited, end, wait.checked_at, from_any=from_any)
            except GroupLeftError:
                words, _ = self._advance(is_done)  # a peer may have sent the rest, and left or died afterwards
                if words and not is_done():
                    raise
        return [] if is_done() else words

    def fail(self, error: BaseException) -> None:
        """Fail all open messages with `error`: the group is unusable."""
        self.leave(error)
        with self._lock:
            open_works = [item.work for queue in self._sends for item in queue]
            open_works += [item.work for item in self._receives]
            open_works += [
                item.receive.work for item in self._arriving if item is not None and item.receive is not None
            ]
            for queue in self._sends:
                queue.clear()
            self._receives.clear()
            self._kept.clear()
            self._arriving = [None for _ in self._peers]
        for work in open_works:
            work.finish(error)

    def attend(self) -> None:
        """Have the helper thread move open messages, after a head start for a thread that waits."""
        if self._helper is None:
            helper = threading.Thread(target=self._serve, name=self._name, daemon=True)
            helper.start()
            self._helper = helper
        elif self._idle:
            self._ring()

    def _ring(self) -> None:
        self._kick.value += 1
        futex.wake(ctypes.addressof(self._kick))

    def close(self) -> None:
        """End the helper thread."""
        self._closed = True
        self._ring()
        if self._helper is not None and self._helper is not threading.current_thread():
            self._helper.join(5)

    def _serve(self) -> None:
        kick = ctypes.addressof(self._kick)
        while not self._closed:
            rung = self._kick.value
            self._idle = False
            time.sleep(_HEAD_START_S)
            try:
                self._idle = True  # messages that start from now on wake this thread
                words = self._step(time.monotonic() + self._timeout_s, self)
            except BaseException as error:
                self.fail(error)
                words = []
            self._sleep([(kick, rung), *words], SLICE_S if words else _IDLE_S)

    def _has_changed(self, words: Sequence[tuple[int, int]]) -> bool:
        """Look at words for a moment; whether one has changed."""
        content, start = self._progress.words, self._progress.memory.address
        places = [((address - start) // WORD, value) for address, value in words]
        for _ in range(self._progress.looks // (2 * len(places))):
            for place, value in places:
                if content[place] != value:
                    return True
        return False

    @staticmethod
    def _sleep(words: Sequence[tuple[int, int]], seconds: float) -> None:
        if len(words) == 1:
            futex.wait(*words[0], seconds)
        else:
            futex.wait_any(words, seconds)
