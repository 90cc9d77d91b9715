"""How waits end: a rank's abort flag, helper threads for waits in C++, abort and recovery of torch's own groups.

While the flag is set, waits end and no communication starts. Nothing can interrupt a wait in C++: whoever starts one in
a helper thread may stop waiting for it.

Torch's own groups are those of backends with a working abort, which means NCCL: no Python runs in an operation. All
their backends are aborted at once, and fresh ones swapped into the same groups. On Gloo this would hang if an abort met
an operation that was just starting; Gloo has `RecoverableGroup`.

Private hook: torch keeps one backend per backend type of a group, and ignores a second one that is registered under the
same type. The types after the named ones are free, so each swap takes the next. Objects that hold the group keep it.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from msgspec import Struct
from torch._C._distributed_c10d import PrefixStore, Store

from axon_nb.engine.frames import step_depth
from axon_nb.records.ranks import name_ranks

_POLL_S = 0.02
_FIRST_TYPE = 7
_LAST_TYPE = 255
MAX_SWAPS = _LAST_TYPE - _FIRST_TYPE + 1
"""How often one group can get a fresh backend."""
_PEERS_TIMEOUT_S = 30.0
T = TypeVar("T")
c10d = dist.distributed_c10d


class AbortedError(RuntimeError):
    """The cell was aborted while this rank was in a communication call, or before it started one."""


class BrokenGroupError(AbortedError):
    """Communication is not possible until a rank is replaced."""


class AbortFlag:
    """Set by the control thread, cleared when the groups are rebuilt; also holds where the cell is to stop."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.set = self._flag.set
        self.is_set = self._flag.is_set
        self._broken = ""
        self._stop: tuple[str, int] | None = None

    def clear(self, *, broken: str = "") -> None:
        """Allow communication again.

        Args:
            broken: Why the groups cannot be rebuilt: communication is then refused, but cells still run.
        """
        self._broken = broken
        self._flag.clear()

    def raise_if_set(self, where: str = "") -> None:
        """Raise if communication must not start.

        Raises:
            AbortedError: the cell is being aborted, or the groups are disabled.
        """
        if self._flag.is_set():
            raise AbortedError(f"aborted{' before ' + where if where else ''}")
        if self._broken:
            raise BrokenGroupError(f"{where or 'communication'} failed: {self._broken}.")

    def stop_at(self, sequence: int | None, *, group: str = "") -> None:
        """Stop before the collective after number `sequence` of `group` (empty: of all groups); None cancels that."""
        self._stop = None if sequence is None else (group, sequence)

    def stop_requested(self) -> bool:
        """Whether the cell is to stop before one of the next collectives."""
        return self._stop is not None

    def raise_at_cut(self, sequence: int, total: int, *, group: str, name: str) -> None:
        """Raise if the cell is to stop before this collective; an optimizer step in progress finishes first.

        Args:
            sequence: Number of the collective in `group`, in this cell.
            total: Its number among the collectives of all groups.
            group: Name of its group.
            name: The operation.

        Raises:
            KeyboardInterrupt: the cell stops here; every rank raises it before the same collective.
        """
        stop = self._stop  # the control thread may change it meanwhile
        if stop is None or stop[0] not in ("", group):
            return
        number = sequence if stop[0] else total
        if number > stop[1] and not step_depth(sys._getframe(1)):
            raise KeyboardInterrupt(f"stopped before {name}, like all ranks")


class HelperThreads:
    """Daemon threads that are reused when they are done; one that gets stuck is left alone."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread."""
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(jobs,), name="axon_nb-wait", daemon=True).start()
        jobs.put(work)

    def _serve(self, jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            jobs.get()()
            self._idle.append(jobs)


class _Helper(threading.Thread):
    """A daemon thread that works for somebody who may stop waiting."""

    is_abandoned = False
    """Whether nobody waits any more."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.result: Future[Any] = Future()

    def run(self) -> None:
        try:
            self.result.set_result(self._work())
        except BaseException as error:
            self.result.set_exception(error)
            del self  # a cycle with the error, whose frames may hold tensors


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work` in a daemon thread, which may hang, and return its future."""
    helper = _Helper(work, name)
    helper.start()
    return helper.result


def is_abandoned() -> bool:
    """Whether this thread connects for somebody who has stopped waiting: its own waits may end."""
    return getattr(threading.current_thread(), "is_abandoned", False)


def connect_in_helper(
    build: Callable[[], Any],
    *,
    raise_if_cancelled: Callable[[], None],
    timeout_s: float,
    dispose: Callable[[Any], None],
) -> Any:
    """Return what `build` returns, called in a thread that is abandoned if the wait ends first.

    Args:
        build: Connects in C++, where nothing can interrupt it.
        raise_if_cancelled: Called every 20 ms; raises to end the wait.
        timeout_s: Seconds to wait.
        dispose: Disposes of a backend that arrives too late.

    Raises:
        RuntimeError: connecting timed out or failed.
    """
    connector = _Helper(build, "axon_nb-connect")

    def dispose_of_late(result: Future[Any]) -> None:
        if result.exception() is None:
            in_thread(lambda: dispose(result.result()), "axon_nb-dispose")

    try:
        connector.start()
        end = time.monotonic() + timeout_s
        while not wait([connector.result], _POLL_S).done:
            raise_if_cancelled()
            if time.monotonic() > end:
                raise RuntimeError(f"connecting timed out after {timeout_s:g} s")
    except BaseException:  # an interrupt may land anywhere here
        connector.is_abandoned = True
        connector.result.add_done_callback(dispose_of_late)
        raise
    return connector.result.result()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that carries `group`'s tensors on `device`; None if there is none.

    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps each backend. The wrapper cannot be aborted, the backend in it can.
    """
    try:
        backend = group._get_backend(torch.device(device.type))
    except RuntimeError:
        return None
    while (wrapped := getattr(backend, "wrapped_pg", None)) is not None:
        backend = wrapped
    return backend


def swap_backend(group: dist.ProcessGroup, backend: Any, device: torch.device, *, earlier: int = 0) -> None:
    """Make `group` communicate tensors of `device` through `backend` from now on; call it on the main thread.

    The default backend type does not change: torch derives the group's name ("nccl") from it, and has no names for the
    types used here. torch requests hooks and sequence numbers from the old backend of the type, never communication.
    The device is not bound to the group: torch would split new groups from this one, which all ranks must take part in.

    Args:
        group: A group with no operation in progress.
        backend: Connected to the same peers in the same order.
        device: Where the tensors are.
        earlier: How often this group's backend has been swapped before.

    Raises:
        BrokenGroupError: the group has been swapped 249 times.
    """
    if earlier >= MAX_SWAPS:
        raise BrokenGroupError(
            f"Group {group.group_name!r} has been rebuilt {MAX_SWAPS} times, the most that torch allows. "
            "Run `%distributed restart` to start new ranks."
        )
    kind = dist.ProcessGroup.BackendType(_FIRST_TYPE + earlier)
    name, desc = group.group_name, group.group_desc
    group._register_backend(torch.device(device.type), kind, backend)
    # The backend holds name and description.
    group._set_group_name(name)
    group._set_group_desc(desc)


class BackendKind(Struct, frozen=True):
    """What differs between backends."""

    torch_name: str
    """The `backend=` with which torch makes such groups."""
    owns: Callable[[Any], bool]
    """Whether a backend is of this kind."""
    start: Callable[[Any, torch.device], None]
    """Connect a backend that torch has just made; called in a helper thread."""
    connect: Callable[[Store, dist.ProcessGroup, list[int], timedelta, torch.device], Any]
    """Return a fresh connected backend for a group, given its store, the group, its global ranks, the timeout of its
    operations and the device; called in a helper thread."""
    abort: Callable[[Any], None]
    """Abort all that a backend does; from any thread."""
    connect_timeout_s: float
    """Seconds that connecting may take once all peers are present."""


class NativeGroups:
    """The groups of one kind on this rank.

    Args:
        kind: How they are connected and aborted.
        root: The store that all ranks can reach; each rebuild uses its own prefix.
        device: Where this rank computes.
        timeout: Timeout of the groups' operations.
        abort: The rank's abort flag.
        before_connect: Called with a group and the number of the rebuild before any of its ranks connects.
    """

    def __init__(
        self,
        kind: BackendKind,
        root: Store,
        *,
        device: torch.device,
        timeout: timedelta,
        abort: AbortFlag,
        before_connect: Callable[[dist.ProcessGroup, int], None] = lambda group, epoch: None,
    ) -> None:
        self._kind = kind
        self._root = root
        self.device = device
        """Where this rank computes."""
        self._timeout = timeout
        self._before_connect = before_connect
        self._raise_if_aborted = abort.raise_if_set
        self._aborted: list[Any] = []
        self._suspended: list[Any] = []
        self._lock = threading.Lock()
        self._swaps: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
        self.rebuilt_at_ns = time.time_ns()
        """When the groups were last rebuilt, in nanoseconds since 1970; what a recorder holds from before is stale."""

    def all(self) -> list[dist.ProcessGroup]:
        """Return the groups by name: in the same order on all ranks that share them."""
        groups = [group for group in list(c10d._world.pg_names) if self._kind.owns(backend_of(group, self.device))]
        return sorted(groups, key=lambda group: (len(group.group_name), group.group_name))

    def timeout_of(self, group: dist.ProcessGroup) -> timedelta:
        """Return the timeout of a group's operations."""
        options = getattr(backend_of(group, self.device), "options", None)
        timeout: timedelta = getattr(options, "_timeout", self._timeout)
        return timeout

    def exchange(self, epoch: int, text: str) -> dict[int, str]:
        """Return what each rank says, by rank, without communication on the device; collective over all ranks.

        Args:
            epoch: Number of the rebuild.
            text: What this rank says.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        store = PrefixStore(f"epoch{epoch}/said/", self._root)
        store.set(str(rank), text)
        wait_for_peers(store, rank, size, raise_if_cancelled=self._raise_if_aborted)
        return {peer: store.get(str(peer)).decode() for peer in range(size)}

    def num_collectives(self) -> int:
        """Return how many collectives this rank has started in its current backends, as torch counts them."""
        return sum(int(backend_of(group, self.device)._get_sequence_number_for_group()) for group in self.all())

    def connect(self, group: Any, epoch: int) -> None:
        """Connect a group that torch has just made, if it is one of these; collective over its members.

        torch would connect in the first operation, on the main thread, where nothing could end the wait for a peer.

        Args:
            group: The group; for a rank that is not a member, torch's placeholder.
            epoch: How often the groups have been rebuilt.

        Raises:
            AbortedError: the cell was aborted meanwhile.
            RuntimeError: a peer did not arrive, or did not connect.
        """
        if not isinstance(group, dist.ProcessGroup) or not self._kind.owns(backend := backend_of(group, self.device)):
            return
        self._before_connect(group, epoch)
        store = PrefixStore(f"connect{epoch}/{group.group_name}/", self._root)
        wait_for_peers(
            store,
            group.rank(),
            group.size(),
            raise_if_cancelled=self._raise_if_aborted,
            timeout_s=self._timeout.total_seconds(),
        )
        self._in_helper(lambda: self._kind.start(backend, self.device), lambda _: self._kind.abort(backend))

    def abort(self, *, timeout_s: float) -> list[str]:
        """Abort all that these groups do on this rank, from any thread; each group once until it is rebuilt.

        Two communicators that are aborted one after the other can wait for each other, so each gets a thread.

        Args:
            timeout_s: Seconds after which unfinished aborts are left alone.

        Returns:
            Names of the groups whose abort did not finish in time.
        """
        jobs: list[tuple[str, threading.Thread]] = []
        with self._lock:
            for group in self.all():
                backend = backend_of(group, self.device)
                if any(backend is other for other in self._aborted):
                    continue
                self._aborted.append(backend)
                thread = threading.Thread(target=self._kind.abort, args=(backend,), name="axon_nb-abort", daemon=True)
                jobs.append((group.group_name, thread))
        for _, thread in jobs:
            thread.start()
        end = time.monotonic() + timeout_s
        for _, thread in jobs:
            thread.join(max(0.0, end - time.monotonic()))
        return [name for name, thread in jobs if thread.is_alive()]

    def suspend(self) -> str:
        """Let the backends give back what they keep on the device, until `resume`; collective over all ranks.

        Returns:
            Why they keep it; empty if they do not.
        """
        backends = [backend_of(group, self.device) for group in self.all()]
        try:
            for backend in backends:
                backend.memory_stats()
        except AttributeError:
            return f"this is torch {torch.__version__}"
        except RuntimeError as error:  # this backend or its NCCL has none
            return str(error).partition("\n")[0]
        for backend in backends:
            self._suspended.append(backend)
            self._in_helper(backend.suspend)
        return ""

    def resume(self) -> None:
        """Let the backends that `suspend` has reached take it again, unless they were replaced; collective, too."""
        suspended, self._suspended = self._suspended, []
        for group in self.all():
            backend = backend_of(group, self.device)
            if any(backend is other for other in suspended):
                self._in_helper(backend.resume)

    def _in_helper(self, meet: Callable[[], Any], dispose: Callable[[Any], None] = lambda _: None) -> Any:
        """Return what a call returns that waits in C++ for all ranks of a group; they are here."""
        return connect_in_helper(
            meet,
            raise_if_cancelled=self._raise_if_aborted,
            timeout_s=self._kind.connect_timeout_s,
            dispose=dispose,
        )

    def begin_rebuild(self) -> None:
        """Abort the backends that an abort has not reached, because those of their peers are gone.

        Raises:
            RuntimeError: one could not be aborted in time.
        """
        late = self.abort(timeout_s=self._kind.connect_timeout_s)
        if late:
            raise RuntimeError(f"the communicators of groups {', '.join(late)} could not be aborted")

    def rebuild(self, group: dist.ProcessGroup, epoch: int) -> None:
        """Give `group` a fresh backend, after `begin_rebuild`; collective over its ranks, on the main thread.

        Args:
            group: One of `all`.
            epoch: Number of this rebuild, the same on all ranks.

        Raises:
            AbortedError: an abort arrived meanwhile.
            RuntimeError: a peer did not arrive, or did not connect.
        """
        ranks = dist.get_process_group_ranks(group)
        self._before_connect(group, epoch)
        store = PrefixStore(f"epoch{epoch}/{group.group_name}/", self._root)
        wait_for_peers(store, group.rank(), group.size(), raise_if_cancelled=self._raise_if_aborted)
        connect = functools.partial(self._kind.connect, store, group, ranks, self.timeout_of(group), self.device)
        backend = self._in_helper(connect, self._kind.abort)
        earlier = self._swaps.get(group, 0)
        swap_backend(group, backend, self.device, earlier=earlier)
        self._swaps[group] = earlier + 1
        if group is c10d._get_default_group():
            # New groups rendezvous here: a name that was used before the abort finds none of its old keys.
            name, _ = c10d._world.pg_map[group]
            c10d._world.pg_map[group] = (name, PrefixStore(f"epoch{epoch}/new/", self._root))

    def end_rebuild(self) -> None:
        """Note that all groups are rebuilt: from now on an abort reaches the fresh backends."""
        self._aborted.clear()
        self.rebuilt_at_ns = time.time_ns()


def wait_for_peers(
    store: Store, rank: int, size: int, *, raise_if_cancelled: Callable[[], None], timeout_s: float = _PEERS_TIMEOUT_S
) -> None:
    """Wait until all ranks of a group are here; connecting is then short, and it cannot be interrupted.

    They may arrive at very different times: Gloo's own limit for connecting is only a few seconds.

    Args:
        store: A fresh prefix.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        raise_if_cancelled: Called every 20 to 50 ms; raises to end the wait.
        timeout_s: Seconds to wait.

    Raises:
        RuntimeError: a rank did not arrive.
    """
    keys = [f"here{peer}" for peer in range(size)]
    store.set(keys[rank], "1")
    end = time.monotonic() + timeout_s
    while True:
        try:
            store.wait(keys, timedelta(seconds=_POLL_S))
            return
        except RuntimeError:  # a FileStore raises nothing narrower when the time is over
            missing = [peer for peer in range(size) if not store.check([keys[peer]])]
        raise_if_cancelled()
        if missing and time.monotonic() > end:
            raise RuntimeError(f"group {name_ranks(missing)} did not arrive within {timeout_s:g} s")
