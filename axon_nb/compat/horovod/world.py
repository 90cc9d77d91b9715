"""`init`, `shutdown` and the queries `rank`, `size`, `local_rank` and `local_size`."""

from __future__ import annotations

import atexit
import os
import socket
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from axon_nb.comm import World
from axon_nb.comm.world import torchrun_environment
from axon_nb.compat.horovod.errors import NotInitializedError

# By default group: the ranks of a mock world share one process. Weak references, as groups must not be kept alive
# after the default group was destroyed: Gloo would crash the process.
_states: weakref.WeakKeyDictionary[Any, State] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class State:
    """Horovod's state on one rank."""

    rank: int
    hosts: list[str]
    """The host of each rank."""
    is_owner: bool
    """Whether `init` created the default group, so that `shutdown` destroys it."""
    present: list[int] = field(default_factory=list)
    """Ranks that had not joined at the last collective."""


def init() -> None:
    """Initialize Horovod on all ranks of a cell, torchrun, mpirun or srun, or in this single process.

    Every rank makes the call. Call it again on every rank after one was replaced.
    """
    previous = _find()
    is_owner = previous is not None and previous.is_owner
    if not dist.is_initialized():
        is_owner = True
        if torchrun_environment(os.environ) is None:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        else:
            World.init()
        atexit.register(shutdown)
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    _states[dist.group.WORLD] = State(dist.get_rank(), hosts, is_owner, list(range(len(hosts))))


def _find() -> State | None:
    return _states.get(dist.group.WORLD) if dist.is_initialized() else None


def current() -> State:
    """Return Horovod's state on this rank.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
    """
    state = _find()
    if state is None:
        raise NotInitializedError
    return state


def shutdown() -> None:
    """Shut down Horovod on this rank. In a cell the ranks and their default group stay."""
    state = _find()
    if state is None:
        return
    _states.pop(dist.group.WORLD)
    if state.is_owner:
        atexit.unregister(shutdown)
        dist.destroy_process_group()


def is_initialized() -> bool:
    """Whether Horovod is initialized."""
    return _find() is not None


def size() -> int:
    """Return the number of ranks."""
    return len(current().hosts)


def rank() -> int:
    """Return this process's rank."""
    return current().rank


def local_size() -> int:
    """Return the number of ranks on this rank's host."""
    state = current()
    return state.hosts.count(state.hosts[state.rank])


def local_rank() -> int:
    """Return this process's rank on its host."""
    state = current()
    return state.hosts[: state.rank].count(state.hosts[state.rank])
