"""The control pages: one per rank, with its progress, its calls and why it left; only the rank itself writes there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from axon_nb.comm.shared_memory.segment import futex
from axon_nb.comm.shared_memory.segment.announcement import in_words, operation_of
from axon_nb.comm.shared_memory.segment.memory import WORD, SharedMemory, process_state, start_time

T = TypeVar("T")

STEPS = 1 << 20
"""Progress units per collective."""

LEFT, PID, READY, AWAITED, SINCE, _REASON, HELD = 8, 9, 10, 11, 12, 13, 14
"""Words of a page; the first is the progress."""
_CALLS, _CALL_WORDS, _NUM_CALLS = 64, 8, 8
_TEXT, _TEXT_BYTES = 2048, 1024
_PLACE, _PLACE_TEXT, _PLACE_BYTES = 128, 3072, 256


class ControlPages:
    """The control pages of a group, as this rank writes its own and reads all.

    Args:
        memory: The group's memory.
        rank: This process's rank in the group.
        members: Global ranks of the group.
    """

    def __init__(self, memory: SharedMemory, rank: int, members: Sequence[int]) -> None:
        self.memory = memory
        self.rank, self.size = rank, memory.layout.size
        self.members = members
        self.words = memory.words
        self.places = [memory.layout.control(peer) // WORD for peer in range(self.size)]
        """Address of each rank's progress word, which begins its control page."""
        self.own_place = self.places[rank]
        self.own_address = memory.address + self.own_place * WORD
        self._started: dict[int, int] = {}
        """Start times of the processes of peers."""
        self.others = [(peer, place) for peer, place in enumerate(self.places) if peer != rank]

    def _raise_word(self, word: int, value: int) -> None:
        """Write a word of this rank's page, after everything that was written before."""
        if futex.NEEDS_FENCE:
            futex.fence()
        self.words[self.own_place + word] = value

    def announce(self, sequence: int, fact: int, line: int) -> None:
        """Announce what this rank does in collective number `sequence`."""
        # Inline, as each collective does it: through a helper, it takes 7 to 14 % longer.
        words, place = self.words, self.own_place + _CALLS + sequence % _NUM_CALLS * _CALL_WORDS
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
        return self._read_whole(place, sequence, lambda: (words[place + 1], words[place + 2])) or (0, 0)

    def _read_whole(self, place: int, sequence: int, read: Callable[[], T]) -> T | None:
        """Read what a rank published with `sequence` in the word at `place`; None: not yet, or it is being replaced."""
        words = self.words
        if words[place] != sequence:
            return None
        if futex.NEEDS_FENCE:
            futex.fence()
        content = read()
        if futex.NEEDS_FENCE:
            futex.fence()
        return content if words[place] == sequence else None

    def name_place(self, sequence: int, place: str) -> None:
        """Say where in the user's code this rank makes the call of collective number `sequence`."""
        words, index = self.words, self.own_place + _PLACE
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
        page = self.memory.layout.control(rank) + _PLACE_TEXT

        def read() -> str:
            return self.memory.bytes[page : page + min(words[index + 1], _PLACE_BYTES)].decode(errors="replace")

        return self._read_whole(index, sequence, read) or ""

    def same_call(self, sequence: int, fact: int) -> bool:
        """Whether all ranks, which have announced their calls, make the same call in collective number `sequence`."""
        words, offset = self.words, _CALLS + 1 + sequence % _NUM_CALLS * _CALL_WORDS
        return all(words[place + offset] == fact for place in self.places)

    def is_alive(self, peer: int) -> bool:
        """Whether the process of a rank is alive, as far as known; True before it has arrived.

        Its start time, which a later process with the same number does not have, is compared as this process sees it:
        an emulator (qemu) shows each process another start time of itself.
        """
        pid = self.words[self.places[peer] + PID]
        if not pid or peer == self.rank:
            return True
        started = start_time(pid)
        return started > 0 and self._started.setdefault(peer, started) == started

    def _give_reason(self, reason: str) -> None:
        page = self.memory.layout.control(self.rank) + _TEXT
        text = reason.encode()[:_TEXT_BYTES]
        self.memory.bytes[page : page + len(text)] = text
        self.words[self.own_place + _REASON] = len(text)

    def reason_of(self, peer: int) -> str:
        """Why a rank left the group, as the caller has seen."""
        if futex.NEEDS_FENCE:
            futex.fence()
        page = self.memory.layout.control(peer) + _TEXT
        size = min(self.words[self.places[peer] + _REASON], _TEXT_BYTES)
        return self.memory.bytes[page : page + size].decode(errors="replace")

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {self.members[rank]}" for rank in ranks)

    def behind(self) -> list[int]:
        """Return the group ranks that have made less progress than this one."""
        sequence = self.words[self.own_place]
        return [peer for peer, place in self.others if self.words[place] < sequence]

    def last_call(self, rank: int) -> tuple[str, int, bool]:
        """Return the operation and line of a rank's last collective, and whether it waits there; "" and 0: none."""
        place = self.places[rank]
        fact, line = self.call_of(rank, self.words[place] // STEPS)
        return operation_of(fact) if fact else "", line, bool(self.words[place + AWAITED])

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of a rank is stopped, as by SIGSTOP."""
        return process_state(self.words[self.places[rank] + PID]) in ("T", "t")

    def describe(self) -> list[str]:
        """Describe each rank's call; works in any process that maps the memory, even if the rank is stuck."""
        lines = []
        for rank, place in enumerate(self.places):
            sequence, step = divmod(self.words[place], STEPS)
            fact, line = self.call_of(rank, sequence)
            awaited = self.words[place + AWAITED]
            text = f"rank {self.members[rank]}: collective {sequence}, step {step}"
            text += f", {in_words(fact, self.members)} at line {line}" if fact else ""
            text += f", waits for rank {self.members[awaited - 1]}" if awaited else ""
            lines.append(text)
        return lines
