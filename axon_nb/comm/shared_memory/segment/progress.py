"""The progress of each rank, and all waits for it.

A rank's control page holds its progress: 2^20 times the number of its collective, plus the step in it. The word only
grows, and only its rank writes it; other ranks sleep on it. Every 50 ms a wait checks whether to go on. It ends if this
rank or a peer has left the group, a peer is dead, the timeout has expired, or the group's callback raises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from axon_nb.comm.shared_memory.segment import futex
from axon_nb.comm.shared_memory.segment.announcement import in_words, operation_of
from axon_nb.comm.shared_memory.segment.errors import GroupLeftError, PeerLostError, SharedMemoryTimeoutError
from axon_nb.comm.shared_memory.segment.memory import WORD, SharedMemory, process_state, start_time

__all__ = ["STEPS", "Progress"]

STEPS = 1 << 20
"""Progress units per collective."""
_LOOKS = 40
"""Number of polls before this rank sleeps on a word: about 2 us."""
SLICE_S = 0.05
"""Longest sleep between two checks."""

_POSTED, _LEFT, _PID, _START, _READY, _AWAITED, _SINCE, _REASON = 0, 8, 9, 10, 11, 12, 13, 14
_FAILED, _CLOSED = 1, 2
_CALLS, _CALL_WORDS, _NUM_CALLS = 64, 8, 8
_TEXT, _TEXT_BYTES = 2048, 1024
_PLACE, _PLACE_TEXT, _PLACE_BYTES = 128, 3072, 256


class Progress:
    """The control pages of a group.

    Args:
        memory: The group's memory.
        rank: This process's rank in the group.
        members: Global ranks of the group.
        give_up: Called every 50 ms during a wait; raises to abort it.
    """

    def __init__(
        self, memory: SharedMemory, rank: int, members: Sequence[int], give_up: Callable[[], None] | None
    ) -> None:
        self.memory = memory
        self.rank, self.size = rank, memory.layout.size
        self.members = members
        self.words = memory.words
        self.places = [memory.layout.control(peer) // WORD for peer in range(self.size)]
        """Address of each rank's progress word, which begins its control page."""
        self.own = self.places[rank]
        self.own_address = memory.address + self.own * WORD
        self.others = [(peer, place) for peer, place in enumerate(self.places) if peer != rank]
        self._give_up = give_up
        self._checked_at = 0.0
        self.left = ""
        """Why this rank left the group."""
        self.words[self.own + _PID] = os.getpid()
        self.words[self.own + _START] = start_time(os.getpid())
        self._raise_word(_READY, 1)
        futex.wake(self.own_address)

    def _raise_word(self, word: int, value: int) -> None:
        """Write a word of this rank's page, after everything that was written before."""
        if futex.NEEDS_FENCE:
            futex.fence()
        self.words[self.own + word] = value

    def announce(self, sequence: int, fact: int, line: int) -> None:
        """Announce what this rank does in collective number `sequence`."""
        words, place = self.words, self.own + _CALLS + sequence % _NUM_CALLS * _CALL_WORDS
        words[place] = 0
        if futex.NEEDS_FENCE:
            futex.fence()
        words[place + 1] = fact
        words[place + 2] = line
        if futex.NEEDS_FENCE:
            futex.fence()
        words[place] = sequence

    def call_of(self, rank: int, sequence: int) -> tuple[int, int]:
        """Return the word and line of `rank` in collective number `sequence`; zeros if it has not announced them."""
        words, place = self.words, self.places[rank] + _CALLS + sequence % _NUM_CALLS * _CALL_WORDS
        if words[place] != sequence:  # from an earlier collective, or being written
            return 0, 0
        if futex.NEEDS_FENCE:
            futex.fence()
        fact, line = words[place + 1], words[place + 2]
        if futex.NEEDS_FENCE:
            futex.fence()
        return (fact, line) if words[place] == sequence else (0, 0)

    def name_place(self, sequence: int, place: str) -> None:
        """Say where in the user's code this rank makes the call of collective number `sequence`."""
        words, index = self.words, self.own + _PLACE
        words[index] = 0
        if futex.NEEDS_FENCE:
            futex.fence()
        text = place.encode()[:_PLACE_BYTES]
        page = self.memory.layout.control(self.rank) + _PLACE_TEXT
        self.memory.bytes[page : page + len(text)] = text
        words[index + 1] = len(text)
        if futex.NEEDS_FENCE:
            futex.fence()
        words[index] = sequence

    def place_of(self, rank: int, sequence: int) -> str:
        """Where `rank` makes the call of collective number `sequence`; empty if it has not said so."""
        words, index = self.words, self.places[rank] + _PLACE
        if words[index] != sequence:
            return ""
        if futex.NEEDS_FENCE:
            futex.fence()
        page = self.memory.layout.control(rank) + _PLACE_TEXT
        text = self.memory.bytes[page : page + min(words[index + 1], _PLACE_BYTES)].decode(errors="replace")
        if futex.NEEDS_FENCE:
            futex.fence()
        return text if words[index] == sequence else ""

    def same_call(self, sequence: int, fact: int) -> bool:
        """Whether all ranks, which have announced their calls, make the same call in collective number `sequence`."""
        words, offset = self.words, _CALLS + 1 + sequence % _NUM_CALLS * _CALL_WORDS
        return all(words[place + offset] == fact for place in self.places)

    def post(self, value: int) -> None:
        """Publish this rank's progress; the other ranks then see what it wrote before."""
        if futex.NEEDS_FENCE:
            futex.fence()
        self.words[self.own] = value
        futex.wake(self.own_address)

    def wait_for_all(self, target: int, deadline: float, check: Callable[[], None] | None = None) -> None:
        """Wait until every other rank has reached `target`.

        Args:
            target: The progress.
            deadline: Deadline on `time.monotonic`.
            check: Called with every periodic check; raises to abort the wait.

        Raises:
            GroupLeftError: a rank left the group.
            SharedMemoryTimeoutError: the deadline passed.
        """
        words = self.words
        for peer, place in self.others:
            if words[place] < target:
                self._sleep(peer, place, target, deadline, check)
        if futex.NEEDS_FENCE:
            futex.fence()

    def wait_for(self, peer: int, target: int, deadline: float) -> None:
        """Wait until one rank has reached `target`; like `wait_for_all`."""
        place = self.places[peer]
        if self.words[place] < target:
            self._sleep(peer, place, target, deadline)
        if futex.NEEDS_FENCE:
            futex.fence()

    def _sleep(
        self, peer: int, place: int, target: int, deadline: float, check: Callable[[], None] | None = None
    ) -> None:
        words = self.words
        for _ in range(_LOOKS):
            if words[place] >= target:
                return
        address = self.memory.address + place * WORD
        words[self.own + _SINCE] = time.monotonic_ns()
        words[self.own + _AWAITED] = peer + 1
        try:
            while (seen := words[place]) < target:
                try:
                    self.check_wait((peer,), deadline)
                except GroupLeftError:
                    if self.left or words[place] < target:
                        raise
                    break  # the peer got there first, and left or died afterwards
                if check is not None:
                    check()
                futex.wait(address, seen, SLICE_S)
        finally:
            words[self.own + _AWAITED] = 0

    def check_wait(self, awaited: Sequence[int], deadline: float) -> None:
        """Raise if waiting is pointless.

        Args:
            awaited: Group ranks that this one waits for; if one is dead, the wait ends.
            deadline: Deadline on `time.monotonic`.

        Raises:
            GroupLeftError: a rank left the group or died.
            SharedMemoryTimeoutError: the deadline passed.
        """
        self.raise_if_left()
        for peer in awaited:
            if self.words[self.places[peer] + _LEFT]:
                raise GroupLeftError(f"rank {self.members[peer]} has destroyed the group")
        if self._give_up is not None:
            self._give_up()
        now = time.monotonic()
        if now > deadline:
            raise SharedMemoryTimeoutError(f"timed out while waiting for {self._names(awaited)}")
        if now - self._checked_at < SLICE_S:
            return
        self._checked_at = now
        for peer in awaited:
            if not self.is_alive(peer):
                raise PeerLostError(f"rank {self.members[peer]} died while this rank waited for it")

    def has_left(self) -> bool:
        """Whether this rank has left the group."""
        return bool(self.left)

    def raise_if_left(self) -> None:
        """Raise if a rank left the group after a failure.

        Raises:
            GroupLeftError: a rank did.
        """
        if self.left:
            raise GroupLeftError(self.left)
        words = self.words
        for peer, place in self.others:
            if words[place + _LEFT] == _FAILED:
                raise GroupLeftError(f"rank {self.members[peer]} left the group: {self._reason(peer)}")

    def is_alive(self, peer: int) -> bool:
        """Whether the process of a rank is alive, as far as known; True before it has arrived."""
        place = self.places[peer]
        pid, started = self.words[place + _PID], self.words[place + _START]
        return not pid or not started or start_time(pid) == started

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until every rank has mapped the memory.

        Raises:
            GroupLeftError: a rank left the group or died.
            SharedMemoryTimeoutError: the deadline passed.
        """
        for peer, place in self.others:
            while not self.words[place + _READY]:
                self.check_wait((peer,), deadline)
                futex.wait(self.memory.address + place * WORD, 0, SLICE_S)

    def leave(self, reason: str, *, closed: bool = False) -> None:
        """Abort all waits in this group, here at once and on all peers within 50 ms; callable from any thread.

        Args:
            reason: Why; peers report it.
            closed: Nothing failed, this rank just no longer needs the group: only waits for this rank are aborted.
        """
        if self.left:
            return
        self.left = reason or "this rank has destroyed the group"
        page = self.memory.layout.control(self.rank) + _TEXT
        text = reason.encode()[:_TEXT_BYTES]
        self.memory.bytes[page : page + len(text)] = text
        self.words[self.own + _REASON] = len(text)
        self._raise_word(_LEFT, _CLOSED if closed else _FAILED)
        for place in self.places:
            futex.wake(self.memory.address + place * WORD)

    def _reason(self, peer: int) -> str:
        page = self.memory.layout.control(peer) + _TEXT
        size = min(self.words[self.places[peer] + _REASON], _TEXT_BYTES)
        return self.memory.bytes[page : page + size].decode(errors="replace")

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {self.members[rank]}" for rank in ranks)

    def behind(self) -> list[int]:
        """Return the group ranks that have made less progress than this one."""
        own = self.words[self.own]
        return [peer for peer, place in self.others if self.words[place] < own]

    def last_call(self, rank: int) -> tuple[str, int, bool]:
        """Return the operation and line of a rank's last collective, and whether it waits there; "" and 0: none."""
        place = self.places[rank]
        fact, line = self.call_of(rank, self.words[place] // STEPS)
        return operation_of(fact) if fact else "", line, bool(self.words[place + _AWAITED])

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of a rank is stopped, as by SIGSTOP."""
        return process_state(self.words[self.places[rank] + _PID]) in ("T", "t")

    def describe(self) -> list[str]:
        """Describe each rank's call; works in any process that maps the memory, even if the rank is stuck."""
        lines = []
        for rank, place in enumerate(self.places):
            sequence, step = divmod(self.words[place], STEPS)
            fact, line = self.call_of(rank, sequence)
            awaited = self.words[place + _AWAITED]
            text = f"rank {self.members[rank]}: collective {sequence}, step {step}"
            text += f", {in_words(fact, self.members)} at line {line}" if fact else ""
            text += f", waits for rank {self.members[awaited - 1]}" if awaited else ""
            lines.append(text)
        return lines
