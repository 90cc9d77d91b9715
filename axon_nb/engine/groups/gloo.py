"""Gloo for recoverable groups: connects without getting stuck and to nobody else's processes, and can abort all waits.

Gloo has no working abort, but the timeout of a `recv` closes all connections of its context. That wakes all waits on
them in this process, and the peers across the closed sockets.

Gloo's sockets know no authentication: they take whoever connects, and keep the connection for a group that is formed
later. Linux lists both ends of a loopback connection in /proc/net/tcp, each with its owner.

reduce_scatter runs as what it is inside Gloo: an all_reduce of a copy, of which each rank keeps a part; the sums have
the same bits. Gloo's own handle for it ignores the timeout of a wait, so only a helper thread could wait for it, at two
thread switches per call.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from axon_nb.engine.groups.abort import connect_in_helper
from axon_nb.errors import UsageError
from axon_nb.torch_api import torch_api

_LISTEN, _TIME_WAIT = "0A", "06"
_TABLE = Path("/proc/net/tcp")
_FILES = "/proc/self/fd"
LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT = timedelta(seconds=30)
"""Ranks of a busy machine may start to connect seconds apart; an abort ends the wait anyway."""
_CLOSE_TAG = 0x7FFFFFF0
_OTHER_FILES = 16
"""What the device of the first group opens, and a few to spare."""
_gloo: Any = ProcessGroupGloo  # the stub lacks what is used here
c10d: Any = dist.distributed_c10d
_num_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)  # private; without it Gloo's own handle is used


class _Socket(Struct, frozen=True):
    local: str
    remote: str
    state: str
    uid: int
    inode: int

    @property
    def port(self) -> int:
        return int(self.local.rpartition(":")[2], 16)


def _sockets() -> list[_Socket]:
    """Return all IPv4 sockets of this network namespace; none where the system does not list them."""
    try:
        lines = _TABLE.read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [_Socket(row[1], row[2], row[3], int(row[7]), int(row[9])) for row in rows if len(row) > 9]


def _own_inodes() -> set[int]:
    inodes = set()
    for name in os.listdir(_FILES):
        try:
            target = os.readlink(f"{_FILES}/{name}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes


def listening_ports() -> set[int]:
    """Return the IPv4 ports on which this process listens; none where the system does not list them."""
    listeners = [socket for socket in _sockets() if socket.state == _LISTEN]
    inodes = _own_inodes() if listeners else set()
    return {socket.port for socket in listeners if socket.inode in inodes}


class PeerCheck:
    """Checks the connections that were accepted on some ports, each of them once.

    Args:
        ports: Ports of this process, on loopback.
    """

    def __init__(self, ports: set[int]) -> None:
        self._ports = ports
        self._known: set[int] = set()
        """Inodes of the connections whose other end belongs to this user."""

    def foreign(self) -> list[str]:
        """Describe who else holds the other end of an accepted connection; empty if nobody does."""
        peers, sockets = [], _sockets()
        by_ends = {(socket.local, socket.remote): socket for socket in sockets}
        inodes = _own_inodes() if self._ports else set()
        for socket in sockets:
            if socket.port not in self._ports or socket.state in (_LISTEN, _TIME_WAIT):
                continue
            if socket.inode not in inodes or socket.inode in self._known:
                continue
            other = by_ends.get((socket.remote, socket.local))
            if other is not None and other.inode and other.uid == os.getuid():
                self._known.add(socket.inode)
            else:  # a socket that its process has closed has no owner
                peers.append("a process that is gone" if other is None or not other.inode else f"user {other.uid}")
        return peers


class GlooTransport:
    """Gloo on one rank: the device that all its groups share, and what must be kept of closed groups."""

    def __init__(self) -> None:
        self._address = LOOPBACK
        self._device: Any = None
        self._peers = PeerCheck(set())
        self.abandoned: list[Any] = []
        """Closed groups, each with 2 threads and about 0.14 MiB; see `abandon`."""

    def listen_on(self, ip: str) -> None:
        """Make groups that are created from now on listen on this address of the host only."""
        self._address, self._device = ip, None

    def _open_device(self) -> Any:
        """Return the Gloo device: one for all groups, because each costs threads and file descriptors."""
        if self._device is None:
            before = listening_ports()
            self._device = _gloo.create_device(hostname=self._address, lazy_init=False)
            self._peers = PeerCheck(listening_ports() - before if self._address == LOOPBACK else set())
        return self._device

    def _refuse_foreign_peers(self, backend: Any) -> None:
        """Give up a new group if another user has connected to this rank: it could send what the group receives.

        Raises:
            RuntimeError: somebody has. The next group gets another port.
        """
        if not (foreign := self._peers.foreign()):
            return
        self._device = None
        self.abandon(backend)
        who = ", ".join(sorted(set(foreign)))
        raise RuntimeError(
            f"refused a process group: {len(foreign)} connections to this rank are from {who}. Try again."
        )

    def connect(
        self, store: Store, rank: int, size: int, *, timeout: timedelta, raise_if_cancelled: Callable[[], None]
    ) -> Any:
        """Return a new Gloo backend that is connected to all peers.

        The constructor connects in C++ and cannot be interrupted. It runs in a helper thread, which is abandoned if
        `raise_if_cancelled` raises.

        Args:
            store: Where the peers rendezvous; a fresh prefix.
            rank: This process's rank in the group.
            size: Number of ranks in the group.
            timeout: Timeout of the group's operations.
            raise_if_cancelled: Called every 20 ms; raises to end the wait.

        Raises:
            RuntimeError: a peer did not connect within 30 seconds, or another user connected to this rank.
            UsageError: this process may not open as many files as the group needs.
        """
        _raise_if_out_of_files(size)
        options = _gloo._Options()
        options._devices = [self._open_device()]
        options._timeout = _CONNECT_TIMEOUT
        options._threads = 2
        backend = connect_in_helper(
            lambda: ProcessGroupGloo(store, rank, size, options),
            raise_if_cancelled=raise_if_cancelled,
            timeout_s=math.inf,  # Gloo has its own limit
            dispose=self.abandon,
        )
        self._refuse_foreign_peers(backend)
        backend._set_default_timeout(timeout)
        torch_api().begin_sequence(backend)
        return backend

    def abandon(self, group: dist.ProcessGroup) -> None:
        """Keep a closed group forever: its destructor joins stuck threads while it holds the GIL, and hangs."""
        self.abandoned.append(group)


def _raise_if_out_of_files(size: int) -> None:
    """Check before Gloo connects: it ends the process if a descriptor is missing.

    Raises:
        UsageError: this process may not open as many files as a group of `size` ranks needs.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # no Linux
        return
    except OSError:
        used = limit
    needed = 2 * size + _OTHER_FILES
    if limit != resource.RLIM_INFINITY and used + needed > limit:
        raise UsageError(
            f"A process group of {size} ranks needs up to {needed} more open files, but this rank has {used} open and "
            f"may have {limit} (`ulimit -n`): close files, or raise the limit before you start Jupyter."
        )


def close_connections(backend: Any) -> None:
    """Close all connections of `backend`, from any thread; whatever waits on them fails within milliseconds."""
    probe = torch.zeros(1, device="cpu")
    for peer in range(backend.size()):
        if peer == backend.rank():
            continue
        # All peers: if one has closed its side, the error comes at once and closes nothing on this side.
        with contextlib.suppress(RuntimeError):
            backend.recv([probe], peer, _CLOSE_TAG).wait(timedelta(milliseconds=1))


class MonitoredBarrier:
    """The handle of a barrier of `inner` that blocks: a helper thread starts it and waits for it."""

    def __init__(self, inner: Any, *args: Any, **kwargs: Any) -> None:
        self._run = functools.partial(inner.monitored_barrier, *args, **kwargs)

    def is_completed(self) -> bool:
        """Return False: it starts with the wait."""
        return False

    def wait(self, timeout: timedelta) -> None:
        """Run it; its own timeout counts."""
        self._run()


class ReduceScatterWork:
    """The handle of a reduce_scatter that runs as an all_reduce.

    Args:
        work: Handle of the all_reduce.
        part: This rank's rows of the tensor that is reduced.
        output: Where they are copied when the all_reduce is done.
    """

    def __init__(self, work: Any, part: torch.Tensor, output: torch.Tensor) -> None:
        self._work = work
        self._part: torch.Tensor | None = part
        self._output = output
        self._lock = threading.Lock()

    def _copy_output(self) -> None:
        with self._lock:  # a future's callback has its own thread, and the waiting one needs the complete output
            part, self._part = self._part, None
            if part is not None:
                self._output.copy_(part)

    def wait(self, timeout: timedelta) -> bool:
        """Wait for the result; a wait that timed out can be repeated.

        Raises:
            RuntimeError: the operation failed, or the wait timed out.
        """
        self._work.wait(timeout)
        self._copy_output()
        return True

    def is_completed(self) -> bool:
        """Whether the result is available."""
        if not self._work.is_completed():
            return False
        self._copy_output()
        return True

    def is_success(self) -> bool:
        """Whether the operation succeeded."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Return its failure."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Return its output."""
        return [self._output]

    def get_future(self) -> Any:
        """Return a future of the output."""

        def finish(done: Any) -> list[torch.Tensor]:
            done.value()
            self._copy_output()
            return [self._output]

        return self._work.get_future().then(finish)


def reduce_scatter_via_all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace torch's `reduce_scatter_single` on Gloo; calls that do not fit are left to `original`."""

    def operation(inner: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 3 or not _fits(args[0], args[1], inner.size()):
            return original(inner, *args, **kwargs)
        output, tensor, opts = args
        options = c10d.AllreduceOptions()
        options.reduceOp, options.timeout, options.asyncOp = opts.reduceOp, opts.timeout, opts.asyncOp
        full, rows = tensor.detach().clone(), output.shape[0]
        start = inner.rank() * rows
        return ReduceScatterWork(inner.allreduce([full], options), full[start : start + rows], output.detach())

    return operation


def _fits(output: Any, tensor: Any, size: int) -> bool:
    return bool(
        _num_modes is not None
        and not _num_modes()  # an active mode, such as one that counts calls, must see the call that the user made
        and type(output) is type(tensor) is torch.Tensor
        and output.dtype is tensor.dtype
        and output.device == tensor.device
        and output.layout is tensor.layout is torch.strided
        and tensor.is_contiguous()
        and output.ndim == tensor.ndim > 0
        and tensor.numel()
        and output.shape[0] * size == tensor.shape[0]
        and output.shape[1:] == tensor.shape[1:]
    )
