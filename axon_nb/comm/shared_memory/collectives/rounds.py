"""One collective, step by step: announce, meet, then move pieces through the slots.

In each step a rank writes a piece into one of its slots, posts the step, waits until the others have posted the
previous step, and reads what they wrote. A rank that has posted step `i + 1` has therefore written piece `i` and read
piece `i - 2`. With four slots, no rank writes to a slot that another may still read, also across collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from axon_nb.comm.errors import CollectiveMismatchError
from axon_nb.comm.shared_memory.segment.memory import SLOTS
from axon_nb.comm.shared_memory.segment.pages import STEPS, mismatch, operation_of
from axon_nb.comm.shared_memory.segment.progress import Progress
from axon_nb.records.ranks import format_ranks

_AHEAD = 5
"""How many failed collectives a rank may be ahead of the slowest one; its announcements are still readable then."""
_MORE_STEPS = 3
"""A collective has fewer steps than pieces and these."""
_ANNOUNCE_S, _EXPLAIN_S = 0.25, 2.0
"""If calls differ, how long a rank waits for others to announce their calls, and then to say where they make them, so
that the error names all of them."""
_EXPLAIN_POLL_S = 0.002


class Rounds:
    """The collectives of a group, one at a time.

    Args:
        progress: The group's control pages.
        timeout_s: Timeout of a collective in seconds.
        place: Names the call that this rank makes, such as ``full_tensor at line 4``, for an operation and its line in
            the user's code (0: unknown); None: the operation and its line are named.
    """

    def __init__(self, progress: Progress, timeout_s: float, place: Callable[[str, int], str] | None = None) -> None:
        self.progress = progress
        self.layout = progress.memory.layout
        self.buffer = progress.memory.bytes
        self.address = progress.memory.address
        self.rank, self.size = progress.rank, progress.size
        self.timeout_s = timeout_s
        self._place = place
        self.sequence = 0
        """Number of collectives that this rank has started."""
        self._first_slot = 0
        self._base = 0
        self._fact = 0
        self._deadline = 0.0
        self._met = 0

    def begin(self, fact: int, line: int) -> None:
        """Start a collective: announce it before any data moves.

        Raises:
            GroupLeftError: this rank or a peer has left the group.
        """
        progress = self.progress
        progress.raise_if_left()
        self._deadline = time.monotonic() + self.timeout_s
        self.sequence = sequence = self.sequence + 1
        if sequence - self._met > _AHEAD:
            progress.wait_for_all((sequence - _AHEAD) * STEPS, self._deadline)
        self._base = sequence * STEPS
        self._fact = fact
        progress.announce(sequence, fact, line)

    def wait_for_peers(self) -> None:
        """Wait until all ranks have announced this collective and posted step 1.

        Raises:
            CollectiveMismatchError: a rank makes a different call; none continues, and all can start the next
                collective.
            GroupLeftError: a rank left the group.
            SharedMemoryTimeoutError: the timeout expired.
        """
        progress = self.progress
        progress.wait_for_all(self._base + 1, self._deadline, self._raise_if_different)
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
        _, line = self.progress.call_of(self.rank, self.sequence)
        if self._place is not None and (text := self._place(operation, line)):
            return text
        return _place(operation, line)

    def post(self, step: int) -> None:
        """Post that this rank has finished the step."""
        self.progress.post(self._base + step)

    def wait(self, peer: int, step: int) -> None:
        """Wait until a rank, or with -1 every rank, has finished the step."""
        if peer < 0:
            self.progress.wait_for_all(self._base + step, self._deadline)
        elif peer != self.rank:
            self.progress.wait_for(peer, self._base + step, self._deadline)

    def missing(self) -> str:
        """Name the ranks that have not arrived at this collective."""
        progress = self.progress
        ranks = [progress.members[peer] for peer, place in progress.others if progress.words[place] <= self._base]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"

    def piece_bytes(self, size: int) -> int:
        """Return how many bytes of a rank's `size` bytes one piece takes."""
        layout = self.layout
        return layout.slot_bytes if size <= layout.slot_bytes else layout.chunk_bytes

    def slot(self, rank: int, piece: int) -> int:
        """Return the address of a piece of a rank's data."""
        return self.layout.slot(rank, (self._first_slot + piece) % SLOTS)

    def end(self, pieces: int) -> None:
        """End the collective, which has used this many slots."""
        self._first_slot = (self._first_slot + pieces) % SLOTS
        if pieces > STEPS - _MORE_STEPS:  # its steps are in the range of the next collectives: skip their numbers
            self.sequence += (pieces + _MORE_STEPS) // STEPS
            self._met = self.sequence

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
        self.wait_for_peers()
        self.move(pieces, write, read, peer)
        self.end(pieces)

    def move(
        self, pieces: int, write: Callable[[int], None] | None, read: Callable[[int], None] | None, peer: int = -1
    ) -> None:
        """Move all pieces, the first of which is written and posted; like `run`."""
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


def _place(operation: str, line: int) -> str:
    return f"{operation} at line {line}" if line else operation
