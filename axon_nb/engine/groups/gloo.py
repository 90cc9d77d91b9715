"""Gloo as recoverable groups use it: connect without being stuck, end all waits from outside.

Gloo has no abort that works. What does: the timeout path of a `recv` closes all connections of its context, which wakes
whoever waits on them in this process, and the peers across the closed sockets.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from axon_nb.engine.groups.threads import run_in_helper
from axon_nb.engine.store import give_up_waits, want_waits
from axon_nb.torch_api import torch_api

__all__ = ["LOOPBACK", "connect", "leak", "leaked", "listen_on", "poison", "shared_device"]

LOOPBACK = "127.0.0.1"

_CONNECT_LIMIT = timedelta(seconds=30)
"""Ranks of a busy machine may begin to connect seconds apart; an abort ends the wait anyway."""
_POISON_TAG = 0x7FFFFFF0
_PIECE_S = 0.02

_gloo: Any = ProcessGroupGloo  # the stub lacks what is used here
_device: list[Any] = []
_address = [LOOPBACK]
_graveyard: list[Any] = []


def listen_on(ip: str) -> None:
    """Have groups made from now on listen on this address of the host alone."""
    _address[:] = [ip]
    _device.clear()


def shared_device() -> Any:
    """The Gloo device of this process: one for all groups, else each costs threads and file descriptors."""
    if not _device:
        _device.append(_gloo.create_device(hostname=_address[0], lazy_init=False))
    return _device[0]


def connect(store: Store, rank: int, size: int, *, timeout: timedelta, give_up: Callable[[], None]) -> Any:
    """A new Gloo backend, connected to all peers.

    The constructor connects in C++ and cannot be interrupted: it runs in a helper thread, which is left behind when
    `give_up` raises.

    Args:
        store: Where the peers meet; a fresh prefix.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        timeout: Limit of the group's operations.
        give_up: Called every 20 ms; raises when the wait is to end.

    Raises:
        RuntimeError: a peer did not come within 30 seconds.
    """
    options = _gloo._Options()
    options._devices = [shared_device()]
    options._timeout = _CONNECT_LIMIT
    options._threads = 2
    box: list[Any] = []
    done = threading.Event()

    thread: list[int] = []

    def build() -> None:
        thread.append(threading.get_ident())
        want_waits()
        try:
            box.append(ProcessGroupGloo(store, rank, size, options))
        except BaseException as error:
            box.append(error)
        done.set()

    run_in_helper(build)
    try:
        while not done.wait(_PIECE_S):
            give_up()
    except BaseException:  # an interrupt may land anywhere here
        _graveyard.append(box)
        # Else it would stand between the next forming and the store until its limit is over.
        if thread:
            give_up_waits(thread[0])
        raise
    if isinstance(box[0], BaseException):
        raise box[0]
    backend = box[0]
    backend._set_default_timeout(timeout)
    torch_api().begin_sequence(backend)
    return backend


def poison(backend: Any) -> None:
    """Close all connections of `backend`, from any thread; whoever waits on them gets an error within milliseconds."""
    probe = torch.zeros(1)
    for peer in range(backend.size()):
        if peer == backend.rank():
            continue
        # All peers: where the first has closed its side the error comes at once, and closes nothing on this side.
        with contextlib.suppress(RuntimeError):
            backend.recv([probe], peer, _POISON_TAG).wait(timedelta(milliseconds=1))


def leak(group: dist.ProcessGroup) -> None:
    """Keep a poisoned group for ever: its destructor joins stuck threads while it holds the GIL, and hangs."""
    _graveyard.append(group)


def leaked() -> int:
    """How many poisoned groups this process keeps, each with 2 threads and some 0.14 MiB."""
    return len(_graveyard)
