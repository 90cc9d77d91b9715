"""The control pages: one per rank, with its progress, its announced calls and why it left; only the rank writes there.

An announcement is a word that says what a rank is about to do. From the highest bit: operation (5 bits), reduce
operation + 1 (4), dtype (6), root + 1 (10), number of elements or bytes (38). Two calls match if their words are equal.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from axon_nb.comm.shared_memory.segment import futex
from axon_nb.comm.shared_memory.segment.memory import WORD, SharedMemory, process_state, start_time
from axon_nb.records.ranks import name_ranks
from axon_nb.records.waits import advice_for

T = TypeVar("T")
STEPS = 1 << 20
"""Progress units per collective."""
LEFT, PID, READY, AWAITED, SINCE, _REASON, HELD = 8, 9, 10, 11, 12, 13, 14
"""Words of a page; the first is the progress."""
_CALLS, _CALL_WORDS, _NUM_CALLS = 64, 8, 8
_TEXT, _TEXT_BYTES = 2048, 1024
_PLACE, _PLACE_TEXT, _PLACE_BYTES = 128, 3072, 256
OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
"""Names that users know, by number - 1."""
REDUCE_OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""By number, as in torch's `ReduceOp.RedOpType`."""
MAX_RANKS = 1000
UNEVEN = 1022
"""In the place of the root: a reduce_scatter of parts that differ in size; the count is that of all parts. An operation
of FSDP has the number of its module there."""
_NUMBERS = {name: number for number, name in enumerate(OPERATIONS, 1)}
_COUNT_BITS, _ROOT_BITS, _DTYPE_BITS, _REDUCE_BITS = 38, 10, 6, 4
_ROOT = _COUNT_BITS
_DTYPE = _ROOT + _ROOT_BITS
_REDUCE = _DTYPE + _DTYPE_BITS
_OPERATION = _REDUCE + _REDUCE_BITS
_DTYPES: tuple[torch.dtype, ...] = tuple(
    dict.fromkeys(sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str))
)[: (1 << _DTYPE_BITS) - 2]
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, 1)}
_REFUSED_BY_GLOO = frozenset(
    {getattr(torch, name) for name in ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")}
)
_USUAL_CODES = {
    dtype: code for dtype, code in _DTYPE_CODES.items() if dtype not in _REFUSED_BY_GLOO and not dtype.is_complex
}


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


def dtype_code(dtype: torch.dtype | None) -> int:
    """Return the number of a dtype, the same in all processes with one build of torch; 0: bytes."""
    return 0 if dtype is None else _DTYPE_CODES.get(dtype, (1 << _DTYPE_BITS) - 1)


def fact_of(operation: str, count: int, *, dtype: torch.dtype | None = None, root: int = -1, reduce: int = -1) -> int:
    """Encode a call as a word.

    Args:
        operation: One of `OPERATIONS`.
        count: Number of elements of `dtype`, or of bytes without a dtype.
        dtype: The dtype of the elements.
        root: Group rank of the root.
        reduce: Number of the reduce operation.
    """
    return (
        _NUMBERS[operation] << _OPERATION
        | (reduce + 1) << _REDUCE
        | (0 if dtype is None else _USUAL_CODES.get(dtype) or _unusual_code(operation, dtype)) << _DTYPE
        | (root + 1) << _ROOT
        | min(count, (1 << _COUNT_BITS) - 1)
    )


@functools.cache
def _unusual_code(operation: str, dtype: torch.dtype) -> int:
    note_unlike_gloo("" if dtype in _REFUSED_BY_GLOO else operation, dtype)
    return dtype_code(dtype)


def unlike_gloo(operation: str, dtype: torch.dtype, reduction: str = "") -> str:
    """Say what torchrun's Gloo does with a collective that shared memory can run; empty: the same.

    Args:
        operation: One of `OPERATIONS`; empty: any.
        dtype: The dtype of the elements.
        reduction: One of `REDUCE_OPERATIONS`; empty: none.
    """
    is_integer = not dtype.is_floating_point and not dtype.is_complex
    match reduction:
        case "":
            is_refused = dtype in _REFUSED_BY_GLOO or (operation == "gather" and dtype.is_complex)
        case "AVG":
            is_refused = is_integer
        case "PRODUCT":
            is_refused = dtype.is_complex
        case _:
            is_refused = reduction == "PREMUL_SUM"
    if is_refused:
        return "refuses it"
    return "computes other values" if reduction == "SUM" and dtype is torch.bool else ""


@functools.cache
def note_unlike_gloo(operation: str, dtype: torch.dtype, reduction: str = "") -> None:
    """Print a line, once in this process, if torchrun's Gloo does not do the same; for the arguments see above."""
    if outcome := unlike_gloo(operation, dtype, reduction):
        call = f"{reduction or operation or 'communication'} of {str(dtype).removeprefix('torch.')}"
        instead = "MAX" if (dtype, reduction) == (torch.bool, "SUM") else "another dtype or operation"
        sys.stderr.write(
            f"axon_nb: {call} works on these ranks, but torchrun's Gloo {outcome}: use {instead} in code that is to "
            "run there.\n"
        )


def _field(fact: int, place: int, bits: int) -> int:
    return fact >> place & ((1 << bits) - 1)


def in_words(fact: int, members: Sequence[int]) -> str:
    """Describe the call that a word encodes, such as ``all_reduce(SUM) of 4 float32``.

    Args:
        fact: The word.
        members: Global ranks of the group.
    """
    reduce, root = _field(fact, _REDUCE, _REDUCE_BITS), _field(fact, _ROOT, _ROOT_BITS)
    words = operation_of(fact)
    if reduce:
        words += f"({REDUCE_OPERATIONS[reduce - 1]})"
    count = _field(fact, 0, _COUNT_BITS)
    if words != "barrier":
        words += f" of {_unit(fact)}" if words == "all_to_all" else f" of {count:,} {_unit(fact)}"
    if 0 < root <= len(members) and not _has_unit(fact):
        words += f" {'to' if words.startswith(('gather', 'reduce')) else 'from'} rank {members[root - 1]}"
    return words


def operation_of(fact: int) -> str:
    """What users call the operation of a word."""
    number = _field(fact, _OPERATION, 5)
    return OPERATIONS[number - 1] if 0 < number <= len(OPERATIONS) else "communication"


def mismatch(calls: Sequence[tuple[int, str]], members: Sequence[int]) -> str:
    """Return the error message for ranks whose calls do not match.

    Args:
        calls: The word and the place of the call of each group rank, such as ``full_tensor at line 4``; word 0: the
            rank has not called yet.
        members: Global ranks of the group.
    """
    same: dict[tuple[int, str], list[int]] = {}
    for rank, (fact, place) in enumerate(calls):
        if fact:
            same.setdefault((fact, place), []).append(members[rank])
    advice = advice_for(place.partition(" at line ")[0] for _, place in same)
    units = {_field(fact, _ROOT, _ROOT_BITS) for fact, _ in same if _has_unit(fact)}
    if len({_field(fact, _OPERATION, 5) for fact, _ in same}) > 1 or len(units) > 1:
        parts = [
            f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {place}" for (_, place), ranks in same.items()
        ]
        return f"Collective mismatch: {', '.join(parts)}, on the same group.{advice}"
    roots, reductions = (
        len({_field(fact, *bits) for fact, _ in same}) > 1 for bits in ((_ROOT, _ROOT_BITS), (_REDUCE, _REDUCE_BITS))
    )
    places = {place for _, place in same}
    parts = []
    for (fact, place), ranks in same.items():
        passed = _passed(fact, members, root=roots, reduction=reductions)
        parts.append(f"{name_ranks(ranks)} passed {passed}{f' to {place}' if len(places) > 1 else ''}")
    where = f"{places.pop()}: " if len(places) == 1 else ""
    return f"{where}{', '.join(parts)}; all ranks of a group must pass the same.{advice}"


def _has_unit(fact: int) -> bool:
    """Whether a call has no root, and may have the number of a module in its place."""
    return operation_of(fact) in ("all_gather", "reduce_scatter") and _field(fact, _ROOT, _ROOT_BITS) != UNEVEN + 1


def _passed(fact: int, members: Sequence[int], *, root: bool, reduction: bool) -> str:
    """What a rank passes, such as ``4 float32 with root rank 1``."""
    text = _unit(fact) if operation_of(fact) == "all_to_all" else f"{_field(fact, 0, _COUNT_BITS):,} {_unit(fact)}"
    number = _field(fact, _ROOT, _ROOT_BITS)
    if root and 0 < number <= len(members) and not _has_unit(fact):
        text += f" with root rank {members[number - 1]}"
    if number == UNEVEN + 1:
        text += " in uneven parts"
    number = _field(fact, _REDUCE, _REDUCE_BITS)
    return f"{text} with {REDUCE_OPERATIONS[number - 1]}" if reduction and number else text


def _unit(fact: int) -> str:
    return dtype_name(_field(fact, _DTYPE, _DTYPE_BITS)) or "bytes"


def dtype_name(code: int) -> str:
    """What users call the dtype of a number that `dtype_code` returned."""
    if not code:
        return ""
    return str(_DTYPES[code - 1]).removeprefix("torch.") if code <= len(_DTYPES) else "another dtype"


def reduce_number(operation: Any) -> tuple[int, Any]:
    """Return the number and the factor of torch's `ReduceOp`; only PREMUL_SUM has a factor."""
    kind = getattr(operation, "op", operation)
    number = int(getattr(kind, "value", kind))
    if REDUCE_OPERATIONS[number] != "PREMUL_SUM":
        return number, None
    return number, operation.factor if hasattr(operation, "factor") else operation.__getstate__()[1]


class GroupLeftError(RuntimeError):
    """This rank or a peer left the group: it was aborted, was interrupted, or timed out."""


class PeerLostError(GroupLeftError):
    """A rank that this one waits for is dead."""


class SharedMemoryTimeoutError(RuntimeError):
    """A wait timed out."""
