"""The process group that torch sees: every operation of c10d on CPU tensors, over shared memory."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from axon_nb.comm.errors import CommError
from axon_nb.comm.shared_memory.collectives import calls
from axon_nb.comm.shared_memory.collectives.calls import Calls
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.collectives.staging import stage
from axon_nb.comm.shared_memory.messages import Messages
from axon_nb.comm.shared_memory.operations import CollectiveOperations, listed
from axon_nb.comm.shared_memory.order import Order
from axon_nb.comm.shared_memory.profiling import is_profiling, record
from axon_nb.comm.shared_memory.segment.announcement import dtype_code
from axon_nb.comm.shared_memory.segment.errors import GroupLeftError
from axon_nb.comm.shared_memory.segment.forming import form
from axon_nb.comm.shared_memory.segment.progress import Progress
from axon_nb.comm.shared_memory.transfers import ANY, Receive
from axon_nb.comm.shared_memory.work import JoinedWork, SharedWork
from axon_nb.records.stacks import library_of
from axon_nb.torch_api import torch_api

BACKEND = "shm"
"""Name of the backend for `dist.init_process_group` and `dist.new_group`."""

Tensor = torch.Tensor
Job = Callable[[], None]


"""It may be installed from a checkout, outside the folder of packages."""


class SharedMemoryGroup(CollectiveOperations):
    """A process group over shared memory.

    Args:
        store: The rendezvous store.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        timeout: Timeout of each operation.
        name: torch's name of the group.
        members: Global ranks of the group, for messages; default: the group ranks.
        key: Prefix in the store.
        give_up: Called every 50 ms during a wait; raises to abort it.
        line: Returns the line of user code that makes the call; 0: unknown.
        place: Names the call that this rank makes, for an operation and its line; None: by the operation and its line.
        runs_in_wait: Whether a call that the caller waits for runs inside `wait` of its handle, so that a wrapper of
            the group can watch it, instead of before the handle exists.
        max_bytes: Maximum size of the memory; 0: the usual size.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        members: Sequence[int] = (),
        key: str = "memory",
        give_up: Callable[[], None] | None = None,
        line: Callable[[], int] = lambda: 0,
        place: Callable[[str, int], str] | None = None,
        runs_in_wait: bool = False,
        max_bytes: int = 0,
    ) -> None:
        super().__init__(rank, size, name, backend=BACKEND)
        seconds = timeout.total_seconds()
        self._progress = form(
            store,
            rank=rank,
            members=list(members) or list(range(size)),
            key=key,
            timeout_s=seconds,
            give_up=give_up,
            max_bytes=max_bytes,
        )
        self._line = line
        self._pid = os.getpid()
        self._runs_in_wait = runs_in_wait
        self._rounds = Rounds(self._progress, seconds, place)
        self._calls = Calls(self._rounds)
        self._order = Order(f"axon_nb-{name}", self._leave, self._progress.has_left)
        self._messages = Messages(self._progress, f"axon_nb-{name}-messages", seconds, self._leave)
        self._batch: list[SharedWork] | None = None

    def _raise_if_forked(self) -> None:
        if os.getpid() != self._pid:
            raise CommError(
                "This process was forked from a rank, and only the rank can communicate in its groups: "
                "return the data to the rank, or start processes with their own group, as torchrun does."
            )

    def _leave(self, error: BaseException) -> None:
        if not isinstance(error, GroupLeftError) or not self._progress.left:
            self._progress.leave(str(error) or type(error).__name__)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> SharedWork:
        """Send a tensor."""
        if is_profiling():
            return record("send", lambda: self._send(tensors, peer, tag))
        return self._send(tensors, peer, tag)

    def _send(self, tensors: Any, peer: int, tag: int) -> SharedWork:
        (tensor,) = listed(tensors)
        staged = stage(tensor)
        line, work = self._line(), self._message([tensor, staged])
        try:
            code = dtype_code(tensor.dtype)
            self._messages.send(work, staged.address, staged.size, dtype=code, peer=peer, tag=tag, line=line)
            return self._left_to_helper(work)
        except BaseException as error:
            self._messages.fail(error)
            raise

    def recv(self, tensors: Any, source: int, tag: int = 0) -> SharedWork:
        """Receive a tensor from a rank."""
        if is_profiling():
            operator = "recv_any_source_" if source == ANY else ""
            return record("recv", lambda: self._recv(tensors, source, tag), operator)
        return self._recv(tensors, source, tag)

    def _recv(self, tensors: Any, source: int, tag: int) -> SharedWork:
        (tensor,) = listed(tensors)
        staged = stage(tensor, reads=False)
        work = self._message([tensor, staged])
        store = None if staged.address == tensor.data_ptr() else staged.store
        try:
            code = dtype_code(tensor.dtype)
            self._messages.receive(Receive(work, staged.address, staged.size, code, source, tag, store))
            return self._left_to_helper(work)
        except BaseException as error:
            self._messages.fail(error)
            raise

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SharedWork:
        """Receive a tensor from any rank; the handle's `source_rank` identifies the sender."""
        return self.recv(tensors, ANY, tag)

    def _message(self, keep: list[Any]) -> SharedWork:
        self._raise_if_forked()
        self._progress.raise_if_left()
        work = SharedWork(keep[:1])
        work.run_in_wait(functools.partial(self._messages.drive, work))
        work.keep = keep
        return self._noted(work)

    def _left_to_helper(self, work: SharedWork) -> SharedWork:
        if not work.is_completed() and not calls.is_waited_for():
            self._messages.attend()
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> SharedWork:
        works, self._batch = self._batch or [], None
        return JoinedWork(works)

    def abort(self) -> None:
        """Abort all waits in this group, on all its ranks; callable from any thread."""
        if os.getpid() != self._pid:
            return  # a forked child must not end its parent's group
        self._progress.leave("it was aborted")
        self._messages.fail(GroupLeftError("the group was aborted"))

    def shutdown(self) -> None:
        """Leave the group and stop its threads. Peers that wait for this rank are notified."""
        if os.getpid() != self._pid:
            return
        self._progress.leave("", closed=True)
        self._order.close()
        self._messages.close()
        # These refer to this group: without the reference cycle, its memory is freed at once.
        self._order.leave = self._messages.leave = _ignore

    @property
    def progress(self) -> Progress:
        """The control pages of the group, which show what each rank is doing."""
        return self._progress

    def describe(self) -> list[str]:
        """Describe the call that each rank is in, one line per rank."""
        return self._progress.describe()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that start from now on."""
        self._rounds.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout
    supports_coalescing = supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._rounds.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers are in the shared memory."""


def _ignore(error: BaseException) -> None:
    """The group is gone."""


def caller_line() -> int:
    """Return the line of user code that the current thread is in; 0: none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not library_of(file):
            return frame.f_lineno
        frame = frame.f_back
    return 0


def register(name: str = BACKEND) -> None:
    """Register the backend for `dist.init_process_group` and `dist.new_group`.

    Args:
        name: Name of the backend.
    """
    _register(name)


@functools.cache  # torch refuses a second time
def _register(name: str) -> None:
    def create(options: Any, _: Any) -> SharedMemoryGroup:
        return SharedMemoryGroup(
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout or timedelta(minutes=30),
            name=options.group_id,
            members=list(options.global_ranks_in_group),
            line=caller_line,
        )

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    torch_api().register_group_class(name)
