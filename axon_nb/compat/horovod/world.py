"""`init` and `shutdown`, and queries such as `rank` and `local_size`.

Horovod's queries about available backends, such as `nccl_built`.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from axon_nb.comm import World
from axon_nb.comm.world import torchrun_environment
from axon_nb.compat.horovod.runtime.errors import NotSupportedError, converted_errors
from axon_nb.compat.horovod.runtime.process_sets import ProcessSet, check_ranks, register
from axon_nb.compat.horovod.runtime.state import State, current, end_member, find, forget, make_member, remember
from axon_nb.errors import UsageError

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Initialize Horovod on all ranks of a cell, torchrun, mpirun or srun, or in this single process.

    A second call changes nothing, unless a rank was replaced: then every rank must call it, and all start again with
    their existing process sets.

    Args:
        comm: None, or a list of all ranks.
        process_sets: Sets to register, the same on all ranks; ``"dynamic"`` has no effect, as sets can always be added.

    Raises:
        NotSupportedError: an MPI communicator, or a list with only some ranks.
        UsageError: a process set is invalid or differs between ranks.
    """
    wanted = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    owner = _form_world()
    state = find()
    asked = [process_set.ranks for process_set in wanted]
    own = (state is not None, _known_sets(state), socket.gethostname(), asked, comm is None or list(_as_ranks(comm)))
    everyone: list[Any] = [None] * dist.get_world_size()
    with converted_errors("init"):
        dist.all_gather_object(everyone, own)
    _check_comm(everyone)
    if all(there for there, *_ in everyone):
        return
    if any(theirs[3] != everyone[0][3] for theirs in everyone):
        raise UsageError(
            f"hvd.init(process_sets=...): rank 0 has {everyone[0][3]}, other ranks have different ones; pass the same "
            "sets in the same order on every rank."
        )
    before: dict[int, tuple[int, ...]] = next((sets for there, sets, *_ in everyone if there), {})
    if state is not None:
        _end(state)
    fresh = State(dist.get_rank(), tuple(theirs[2] for theirs in everyone), owner=owner)
    remember(fresh)
    make_member(fresh, range(len(everyone)))
    for number, ranks in sorted(before.items()):
        fresh.next_set = number
        make_member(fresh, ranks)
    numbers = {ranks: number for number, ranks in before.items()}
    for process_set in wanted:
        if (ranks := tuple(process_set.ranks or ())) in numbers:
            process_set.process_set_id = numbers[ranks]
        else:
            check_ranks(fresh, process_set)
            register(fresh, process_set)
    if owner:
        atexit.register(shutdown)


def _form_world() -> bool:
    """Ensure that there is a default group; return whether it was created here."""
    if dist.is_initialized():
        return False
    if torchrun_environment(os.environ) is None:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        World.init()
    return True


def _known_sets(state: State | None) -> dict[int, tuple[int, ...]]:
    return {} if state is None else {number: member.ranks for number, member in state.sets.items() if number}


def _as_ranks(comm: Any) -> Iterable[int]:
    if not isinstance(comm, Iterable):
        raise NotSupportedError(f"hvd.init(comm={comm!r}): MPI is not supported; omit `comm`.")
    return comm


def _check_comm(everyone: Sequence[Any]) -> None:
    for rank, theirs in enumerate(everyone):
        if theirs[4] is not True and sorted(theirs[4]) not in ([], list(range(len(everyone)))):
            raise NotSupportedError(
                f"hvd.init(comm={theirs[4]}) on rank {rank}: must include all ranks; for a subset use "
                f"hvd.init(process_sets=[hvd.ProcessSet({theirs[4]})])."
            )


def shutdown() -> None:
    """Shut down Horovod on this rank. In a cell the ranks and their default group stay."""
    state = find()
    if state is None:
        return
    forget()
    _end(state)
    if state.owner and dist.is_initialized():
        atexit.unregister(shutdown)
        dist.destroy_process_group()


def _end(state: State) -> None:
    for member in state.sets.values():
        end_member(member)


def is_initialized() -> bool:
    """Whether Horovod is initialized."""
    return find() is not None


def size() -> int:
    """Number of ranks."""
    return len(current().hosts)


def rank() -> int:
    """This process's rank."""
    return current().rank


def _neighbours(state: State, host: str) -> list[int]:
    return [rank for rank, other in enumerate(state.hosts) if other == host]


def local_size() -> int:
    """Number of ranks on this rank's host."""
    state = current()
    return len(_neighbours(state, state.hosts[state.rank]))


def local_rank() -> int:
    """This process's rank on its host."""
    state = current()
    return _neighbours(state, state.hosts[state.rank]).index(state.rank)


def _across(state: State) -> list[str]:
    """Hosts that have a rank with this local rank, in the order of their first ranks."""
    place = local_rank()
    return [host for host in dict.fromkeys(state.hosts) if len(_neighbours(state, host)) > place]


def cross_size() -> int:
    """Number of hosts that have a rank with this local rank."""
    return len(_across(current()))


def cross_rank() -> int:
    """Index of this host among the hosts that have a rank with this local rank."""
    state = current()
    return _across(state).index(state.hosts[state.rank])


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    state = current()
    return len({len(_neighbours(state, host)) for host in state.hosts}) == 1


def mpi_enabled() -> bool:
    """False: nothing here uses MPI."""
    return False


def mpi_built() -> bool:
    """False: nothing here uses MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Raise: this cannot be answered without MPI.

    Raises:
        NotSupportedError: always; a ValueError, as in Horovod without MPI.
    """
    raise NotSupportedError("Horovod MPI is not enabled here; see hvd.gloo_enabled() and hvd.nccl_built().")


def gloo_enabled() -> bool:
    """Whether torch has Gloo, which is used for CPU tensors."""
    return dist.is_gloo_available()


def gloo_built() -> bool:
    """Whether torch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as a number, such as 22703 for 2.27.3; 0 if torch lacks NCCL."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """False: DDL is not supported."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not supported."""
    return False


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return bool(torch.backends.cuda.is_built())


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None
