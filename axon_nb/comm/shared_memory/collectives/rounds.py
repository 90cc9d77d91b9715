"""One collective, step by step: announce, meet, then move pieces through the slots.

A step is: write a piece into an own slot, post the step, wait until the others have posted the step before, read what
they wrote there. So a rank that has posted step `i + 1` has written piece `i` and has read piece `i - 2`. With four
slots nobody writes to a slot that somebody may still read, within a collective and from one to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from axon_nb.comm.errors import CollectiveMismatchError
from axon_nb.comm.shared_memory.announcement import mismatch, operation_of
from axon_nb.comm.shared_memory.memory import SLOTS
from axon_nb.comm.shared_memory.progress import STEPS, Progress
from axon_nb.records.ranks import format_ranks

__all__ = ["Rounds"]

_AHEAD = 5
"""Collectives that a rank may be ahead of the slowest, when all those failed: what it announced can still be read."""
_ANNOUNCE_S, _EXPLAIN_S = 0.25, 2.0
"""If calls differ, how long a rank waits for others to announce their calls, and then to say where they make them, so
that the error names all of them."""
_EXPLAIN_POLL_S = 0.002


class Rounds:
    """The collectives of a group, one at a time.

    Args:
        progress: The group's control pages.
        limit_s: Seconds that a collective may take.
        place: Names the call that the current thread makes, such as ``full_tensor at line 4``, for an operation; None:
            the operation and its line are named.
    """

    def __init__(self, progress: Progress, limit_s: float, place: Callable[[str], str] | None = None) -> None:
        self.progress = progress
        self.layout = progress.memory.layout
        self.buffer = progress.memory.bytes
        self.address = progress.memory.address
        self.rank, self.size = progress.rank, progress.size
        self.limit_s = limit_s
        self._place = place
        self.sequence = 0
        """How many collectives this rank has begun."""
        self._first_slot = 0
        self._base = 0
        self._fact = 0
        self._limit = 0.0
        self._met = 0

    def begin(self, fact: int, line: int) -> None:
        """Begin a collective: say what it is, before any data move.

        Raises:
            GroupLeftError: this rank or a peer has left the group.
        """
        progress = self.progress
        progress.raise_if_left()
        self._limit = time.monotonic() + self.limit_s
        self.sequence = sequence = self.sequence + 1
        if sequence - self._met > _AHEAD:
            progress.wait_for_all((sequence - _AHEAD) * STEPS, self._limit)
        self._base = sequence * STEPS
        self._fact = fact
        progress.announce(sequence, fact, line)

    def meet(self) -> None:
        """Wait until all ranks have announced this collective and posted step 1.

        Raises:
            CollectiveMismatchError: a rank does something else; no rank goes on, and all can begin the next one.
            GroupLeftError: a rank has left.
            SharedMemoryTimeoutError: the limit is over.
        """
        progress = self.progress
        progress.wait_for_all(self._base + 1, self._limit, self._raise_if_different)
        if not progress.same_call(self.sequence, self._fact):
            self._raise_if_different()
        self._met = self.sequence

    def _raise_if_different(self) -> None:
        calls = [self.progress.call_of(rank, self.sequence) for rank in range(self.size)]
        if any(fact not in (0, self._fact) for fact, _ in calls):
            raise CollectiveMismatchError(self._explain())

    def _explain(self) -> str:
        """Describe how the calls of this collective differ, once all ranks have named theirs, or after a moment."""
        progress, sequence, ranks = self.progress, self.sequence, range(self.size)
        operation = operation_of(self._fact)
        progress.name_place(sequence, self.place(operation))
        start = time.monotonic()
        while missing := [rank for rank in ranks if not progress.place_of(rank, sequence)]:
            announced = any(progress.call_of(rank, sequence)[0] for rank in missing)
            if time.monotonic() - start > (_EXPLAIN_S if announced else _ANNOUNCE_S):
                break
            time.sleep(_EXPLAIN_POLL_S)
        calls = []
        for rank in ranks:
            fact, line = progress.call_of(rank, sequence)
            calls.append((fact, progress.place_of(rank, sequence) or _place(operation_of(fact), line)))
        return mismatch(calls, progress.members)

    def place(self, operation: str) -> str:
        """Name the call that this rank makes."""
        if self._place is not None:
            return self._place(operation)
        return _place(operation, self.progress.call_of(self.rank, self.sequence)[1])

    def post(self, step: int) -> None:
        """This rank has taken the step."""
        self.progress.post(self._base + step)

    def wait(self, peer: int, step: int) -> None:
        """Wait until a rank, or with -1 every rank, has taken the step."""
        if peer < 0:
            self.progress.wait_for_all(self._base + step, self._limit)
        elif peer != self.rank:
            self.progress.wait_for(peer, self._base + step, self._limit)

    def missing(self) -> str:
        """The ranks that have not come to this collective, in words."""
        progress = self.progress
        ranks = [progress.members[peer] for peer, place in progress.others if progress.words[place] <= self._base]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"

    def slot(self, rank: int, piece: int) -> int:
        """Where in the memory a piece of a rank's data stands."""
        return self.layout.slot(rank, (self._first_slot + piece) % SLOTS)

    def end(self, pieces: int) -> None:
        """The collective is over and has used so many slots."""
        self._first_slot = (self._first_slot + pieces) % SLOTS

    def run(
        self, pieces: int, write: Callable[[int], None] | None, read: Callable[[int], None] | None, peer: int = -1
    ) -> None:
        """Move all pieces.

        Args:
            pieces: How many, at least 1.
            write: Writes a piece into this rank's slot.
            read: Reads a piece from slots of others.
            peer: The rank that this one exchanges data with; -1: all.
        """
        if write:
            write(0)
        self.post(1)
        self.meet()
        for piece in range(1, pieces):
            if write:
                write(piece)
            self.post(piece + 1)
            self.wait(peer, piece)
            if read:
                read(piece - 1)
        if pieces > 1:
            self.wait(peer, pieces)
        if read:
            read(pieces - 1)
        self.end(pieces)


def _place(operation: str, line: int) -> str:
    return f"{operation} at line {line}" if line else operation
