"""How the ranks of a group get shared memory, the progress of each rank there, and all waits for it.

The first rank creates the memory, the others find it through the store. A rank's control page holds its progress: 2^20
times the number of its collective, plus the step in it. The word only grows, and only its rank writes it; other ranks
sleep on it. Every 50 ms each wait checks whether to go on. It ends if this rank or a peer has left the group, a peer is
dead, the timeout has expired, or the group's callback raises.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from torch._C._distributed_c10d import Store

from axon_nb.comm.errors import CommError, InvalidArgumentError
from axon_nb.comm.shared_memory.segment import futex, pages
from axon_nb.comm.shared_memory.segment.memory import WORD, Layout, SharedMemory
from axon_nb.records.units import exact_bytes

_FEW_LOOKS, _MANY_LOOKS = 40, 600
"""Number of polls before this rank sleeps on a word: about 2 us, and 30 us if each rank has a processor."""
SLICE_S = 0.05
"""Longest sleep between two checks."""
_AFTER_PAUSE_S = 1800.0
"""How long the others wait at least for a rank that a debugger has released."""
_FAILED, _CLOSED = 1, 2
_NEVER = 1 << 63
"""More than the progress of any rank."""
_PIECE_S = 0.005
_KIB = 1024
_USUAL_BYTES = 256 << 20
"""Maximum size of the memory of all groups of a rank, unless it is set; further groups get the smallest possible."""
_ONE_HOST = ": all ranks must run on one host, in one container and as one user. Use the backend gloo instead"


def is_crowded(size: int) -> bool:
    """Whether the ranks of this host, of which a group has `size`, share processors."""
    num_ranks = max(size, int(os.environ.get("LOCAL_WORLD_SIZE") or 0))
    return num_ranks > len(os.sched_getaffinity(0))


class Progress(pages.ControlPages):
    """The control pages of a group, with the waits for its ranks.

    Args:
        memory: The group's memory.
        rank: This process's rank in the group.
        members: Global ranks of the group.
        give_up: Called every 50 ms during a wait; raises to abort it.
    """

    def __init__(
        self, memory: SharedMemory, rank: int, members: Sequence[int], give_up: Callable[[], None] | None
    ) -> None:
        super().__init__(memory, rank, members)
        self._give_up = give_up
        self.left = ""
        """Why this rank left the group."""
        self.looks = _FEW_LOOKS if is_crowded(self.size) else _MANY_LOOKS
        """Number of polls before this rank sleeps on a word."""
        self.words[self.own_place + pages.PID] = os.getpid()
        _open_groups.add(self)
        self._raise_word(pages.READY, 1)
        futex.wake(self.own_address)

    def post(self, value: int) -> None:
        """Publish this rank's progress; the other ranks then see what it wrote before."""
        if futex.NEEDS_FENCE:
            futex.fence()
        self.words[self.own_place] = value
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
        for _ in range(self.looks):
            if words[place] >= target:
                return
        address = self.memory.address + place * WORD
        words[self.own_place + pages.SINCE] = since = time.monotonic_ns()
        words[self.own_place + pages.AWAITED] = peer + 1
        checked_at = since * 1e-9
        try:
            while (seen := words[place]) < target:
                try:
                    checked_at = self.check_wait((peer,), deadline, checked_at, target=target)
                except pages.GroupLeftError:
                    if self.left or words[place] < target:
                        raise
                    break  # the peer got there first, and left or died afterwards
                if check is not None:
                    check()
                futex.wait(address, seen, SLICE_S)
        finally:
            words[self.own_place + pages.AWAITED] = 0

    def check_wait(
        self,
        awaited: Sequence[int],
        deadline: float,
        checked_at: float,
        *,
        target: int = _NEVER,
        from_any: bool = False,
    ) -> float:
        """Raise if waiting is pointless.

        Args:
            awaited: Group ranks that this one waits for.
            deadline: Deadline on `time.monotonic`.
            checked_at: When this wait last checked who is dead, on `time.monotonic`, or when it began.
            target: The progress that all ranks must make for the wait to end.
            from_any: Whether a message from any rank may end the wait: it then goes on while another rank lives, unless
                that rank is in `awaited`.

        Returns:
            When it last checked who is dead.

        Raises:
            GroupLeftError: a rank left the group or died.
            SharedMemoryTimeoutError: the deadline passed.
        """
        self.raise_if_left()
        words = self.words
        for peer, place in self.others:
            if words[place + pages.LEFT] and (peer in awaited or self._is_behind(place, target)):
                raise pages.GroupLeftError(
                    f"rank {self.members[peer]} {self.reason_of(peer) or 'has destroyed the group'}"
                )
        if self._give_up is not None:
            self._give_up()
        now = time.monotonic()
        if now > deadline and not self._is_held(now):
            raise pages.SharedMemoryTimeoutError(f"timed out while waiting for {self._names(awaited) or 'a message'}")
        is_due = now - checked_at >= SLICE_S
        if (from_any and self.others) and all(
            words[place + pages.LEFT] or (is_due and not self.is_alive(peer)) for peer, place in self.others
        ):
            raise pages.PeerLostError("every other rank died or destroyed the group")
        if not is_due:
            return checked_at
        for peer in awaited if from_any else range(self.size):
            if not self.is_alive(peer):
                place = self.places[peer]
                if peer in awaited:
                    raise pages.PeerLostError(f"rank {self.members[peer]} died while this rank waited for it")
                if not words[place + pages.LEFT] and (target == _NEVER or self._is_behind(place, target)):
                    raise pages.PeerLostError(f"rank {self.members[peer]} died")
        return now

    def hold(self, until_ns: int) -> None:
        """Let waits for this rank continue past their deadline, until a time of `time.monotonic_ns`."""
        self.words[self.own_place + pages.HELD] = until_ns

    def _is_held(self, now: float) -> bool:
        return any(self.words[place + pages.HELD] * 1e-9 > now for place in self.places)

    def _is_behind(self, place: int, target: int) -> bool:
        """Whether a rank that is gone, as the caller has seen, left before it reached `target`."""
        if futex.NEEDS_FENCE:
            futex.fence()
        return self.words[place] < target != _NEVER

    def raise_if_left(self) -> None:
        """Raise if a rank left the group after a failure.

        Raises:
            GroupLeftError: a rank did.
        """
        if self.left:
            raise pages.GroupLeftError(self.left)
        words = self.words
        for peer, place in self.others:
            if words[place + pages.LEFT] == _FAILED:
                raise pages.GroupLeftError(f"rank {self.members[peer]} left the group: {self.reason_of(peer)}")

    def wait_until_ready(self, deadline: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank has mapped the memory.

        Args:
            deadline: Deadline on `time.monotonic`.
            check: Called with every periodic check; raises to abort the wait.

        Raises:
            GroupLeftError: a rank left the group or died.
            SharedMemoryTimeoutError: the deadline passed.
        """
        for peer, place in self.others:
            checked_at = time.monotonic()
            while not self.words[place + pages.READY]:
                check()
                checked_at = self.check_wait((peer,), deadline, checked_at)
                futex.wait(self.memory.address + place * WORD, 0, SLICE_S)
        if futex.NEEDS_FENCE:
            futex.fence()
        for peer, _ in self.others:
            self.is_alive(peer)  # remembers when its process started

    def has_left(self) -> bool:
        """Whether this rank has left the group."""
        return bool(self.left)

    def leave(self, reason: str, *, closed: bool = False) -> None:
        """Abort all waits in this group, here at once and on all peers within 50 ms; callable from any thread.

        Args:
            reason: Why; peers report it.
            closed: Nothing failed, this rank just no longer needs the group: only waits that need it are aborted.
        """
        if self.left and self.words[self.own_place + pages.LEFT]:
            return
        self.left = self.left or reason or "this rank has destroyed the group"
        self._give_reason(reason)
        self._raise_word(pages.LEFT, _CLOSED if closed else _FAILED)
        for place in self.places:
            futex.wake(self.memory.address + place * WORD)


class _OpenGroups:
    """The groups of this process: they share a limit of memory, and are closed when the process exits.

    So a rank whose program ends before that of its peers, without destroying the group, is not taken for dead.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Progress] = weakref.WeakSet()
        self._pid = 0

    def add(self, progress: Progress) -> None:
        """Close it at exit."""
        self._members.add(progress)
        if self._pid != os.getpid():  # once per process; multiprocessing also ends what it forks without atexit
            self._pid = os.getpid()
            multiprocessing.util.Finalize(None, self._close, exitpriority=-1)

    def _close(self) -> None:
        if hasattr(sys, "last_value"):  # an exception ends the program
            return
        for progress in list(self._members):
            if progress.words[progress.own_place + pages.PID] == os.getpid():
                progress.leave("has ended", closed=True)

    def hold(self, until_ns: int) -> None:
        """Hold the timeouts of all; see `Progress.hold`."""
        for progress in list(self._members):
            progress.hold(until_ns)

    def num_bytes(self) -> int:
        """Return the size of their memory in bytes."""
        return sum(progress.memory.layout.total for progress in list(self._members) if not progress.left)


_open_groups = _OpenGroups()


def hold_timeouts(*, is_paused: bool) -> None:
    """Let no wait for this process time out while a debugger holds it, and give it time to catch up afterwards."""
    _open_groups.hold(_NEVER - 1 if is_paused else time.monotonic_ns() + int(_AFTER_PAUSE_S * 1e9))


def open_bytes() -> int:
    """Return the size of the memory of all groups of this process in bytes."""
    return _open_groups.num_bytes()


class ForeignHostError(CommError):
    """The ranks cannot share memory: host, container or user differ, or the system does not support it."""


def form(
    store: Store,
    *,
    rank: int,
    members: list[int],
    key: str,
    timeout_s: float,
    give_up: Callable[[], None] | None = None,
    max_bytes: int = 0,
) -> Progress:
    """Map the memory of a group; collective over its ranks.

    Args:
        store: The rendezvous store.
        rank: This process's rank in the group.
        members: Global ranks of the group.
        key: The store's key for the memory's address; use a new one each time.
        timeout_s: Seconds to wait for the other ranks.
        give_up: Called repeatedly; raises to abort the wait.
        max_bytes: Maximum size of the memory of all groups of the first rank, each of which gets at most half of what
            is left; 0: the usual size.

    Raises:
        InvalidArgumentError: the memory does not fit into `max_bytes`.
        ForeignHostError: the ranks cannot share memory.
        CommError: a rank cannot create or map the memory.
        GroupLeftError: a rank died meanwhile.
        SharedMemoryTimeoutError: a rank did not arrive.
    """
    if not futex.is_supported():
        raise ForeignHostError("Shared memory between ranks needs Linux on x86-64 or aarch64.")
    deadline = time.monotonic() + timeout_s
    failure = _Failure(store, f"{key}/failed", f"Rank {members[rank]}")
    descriptor = -1
    try:
        if rank == 0:
            layout = _layout(len(members), max_bytes, failure)
            with failure.reported(f"cannot create {exact_bytes(layout.total)} of shared memory for the group"):
                descriptor = SharedMemory.create(layout)
            store.set(key, SharedMemory.address_of(descriptor))
        else:
            while not store.check([key]):
                failure.check()
                if give_up is not None:
                    give_up()
                if time.monotonic() > deadline:
                    raise pages.SharedMemoryTimeoutError(f"rank {members[0]} did not create the group's memory in time")
                time.sleep(_PIECE_S)
            address = bytes(store.get(key)).decode()
            with failure.reported(f"cannot open the shared memory of rank {members[0]}", _ONE_HOST, ForeignHostError):
                descriptor = SharedMemory.open(address)
            layout = Layout.read(descriptor, len(members))
        with failure.reported(f"cannot map {exact_bytes(layout.total)} of shared memory for the group"):
            memory = SharedMemory(descriptor, layout)
        progress = Progress(memory, rank, members, give_up)
        progress.wait_until_ready(deadline, failure.check)
        return progress
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _layout(size: int, max_bytes: int, failure: _Failure) -> Layout:
    """Return the layout of a group of `size` ranks; see `form`."""
    used = open_bytes()
    room = (max_bytes or _USUAL_BYTES) - used
    layout = Layout.of(size, max(1, room // 2), is_crowded=is_crowded(size))
    if max_bytes and layout.total > room:
        others = f", of which other groups take {exact_bytes(used)}" if used else ""
        failure.raise_everywhere(
            InvalidArgumentError,
            f"A group of {size} ranks needs at least {exact_bytes(-(-layout.total // _KIB) * _KIB)} of shared memory, "
            f"but group_memory is {exact_bytes(max_bytes)}{others}: raise it, or set it to 0 for the usual size.",
        )
    return layout


class _Failure:
    """Why a rank cannot join, for all ranks, which wait for it.

    Args:
        store: The rendezvous store.
        key: Where the reason stands.
        name: This rank.
    """

    def __init__(self, store: Store, key: str, name: str) -> None:
        self._store, self._key, self._name = store, key, name

    @contextmanager
    def reported(self, what: str, rule: str = "", kind: type[CommError] = CommError) -> Iterator[None]:
        """Raise an `OSError` of the block as a sentence, here and on the other ranks."""
        try:
            yield
        except OSError as error:
            self.raise_everywhere(kind, f"{self._name} {what} ({error.strerror or error}){rule}.", error)

    def raise_everywhere(self, kind: type[CommError], reason: str, cause: Exception | None = None) -> NoReturn:
        """Raise a reason here, and as a `CommError` on the other ranks, unless another rank's came first."""
        self.check()  # the memory may be gone because another rank failed
        self._store.set(self._key, reason)
        raise kind(reason) from cause

    def check(self) -> None:
        """Raise if another rank cannot join."""
        if self._store.check([self._key]):
            raise CommError(bytes(self._store.get(self._key)).decode())
