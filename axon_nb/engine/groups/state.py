"""What all groups of a rank share: its abort flag, the log of its calls, the epoch of the groups."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from axon_nb.engine.groups.abort import AbortFlag
from axon_nb.engine.groups.activity import CallLog
from axon_nb.engine.groups.gloo import GlooTransport
from axon_nb.engine.groups.native import NativeGroups
from axon_nb.engine.helper_threads import HelperThreads
from axon_nb.engine.slowness import Slowdown


class _Work(Protocol):
    def fail(self) -> None: ...


class GroupsState:
    """State that all groups of a rank share."""

    def __init__(self) -> None:
        self.abort = AbortFlag()
        self.calls = CallLog()
        self.gloo = GlooTransport()
        self.helpers = HelperThreads()
        """Threads for waits that cannot be cut into slices."""
        self.slowdown = Slowdown(self.abort.raise_if_set, self.helpers.run)
        """Slows what the cell computes and sends, if it is to be slow, or if a change is to be proven."""
        self.epoch = 0
        """How often the groups have been rebuilt."""
        self.installed = False
        """Whether torch creates recoverable groups."""
        self.rebuilding = False
        """Whether the last rebuild has not completed: it is running, or it failed."""
        self.creating: tuple[str, list[int], int] | None = None
        """The group that `new_group` creates on the main thread: name, global ranks, start in monotonic nanoseconds."""
        self.joined: Counter[str] = Counter()
        """How often this rank has begun to wait for others outside any group, by function, such as ``init_rpc``."""
        self.joining: tuple[str, tuple[int, ...], int] | None = None
        """The one it is in: function, global ranks, start in monotonic nanoseconds."""
        self.native: NativeGroups | None = None
        """The NCCL groups; None on a Gloo rank."""
        self.works_with_future: weakref.WeakSet[_Work] = weakref.WeakSet()
        self.run = 0
        """Number of the cell that runs: the same on all its ranks, up to 2 ** 18."""
        self.skips_rendezvous = False
        """Whether new groups do not wait for their ranks; see `without_rendezvous`."""

    def begin_run(self, run: str) -> None:
        """Note that another cell runs from now on.

        Args:
            run: Its identifier, in hexadecimal digits; the same on all ranks that run it. Empty: unknown.
        """
        self.run = int(run[:8] or "0", 16) & 0x3FFFF

    @contextlib.contextmanager
    def without_rendezvous(self) -> Iterator[None]:
        """Skip `store.rendezvous` within, on a replacement: the other ranks have its groups and only rebuild them."""
        before, self.skips_rendezvous = self.skips_rendezvous, True
        try:
            yield
        finally:
            self.skips_rendezvous = before

    def fail_all_futures(self) -> None:
        """Fail every future in use, from any thread."""
        for work in list(self.works_with_future):
            work.fail()


_current = [GroupsState()]


def current_groups() -> GroupsState:
    """The state of the groups that torch knows: its registry of groups is the process's, and so is this slot."""
    return _current[0]


def set_current_groups(state: GroupsState) -> None:
    """Make `state` that of the groups that torch creates from now on."""
    _current[:] = [state]
