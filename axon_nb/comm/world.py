"""The world (all ranks of the default process group), with rank and world size as functions.

The functions are not in `__all__`: in cells, both names are numbers. Rank and world size come from the launcher's
environment: torchrun, Open MPI, MPICH and Intel MPI, or Slurm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from axon_nb.comm.errors import CommError, InvalidArgumentError, WorldClosedError
from axon_nb.comm.group import Backend, GroupLike, ProcessGroup, as_backend, choose_backend, resolve
from axon_nb.records import environment as variables

if TYPE_CHECKING:
    from axon_nb.comm.mock_world import MockWorld

# For each launcher: rank, world size, local rank, local world size.
_LAUNCHERS = (variables.TORCHRUN.names, variables.OPEN_MPI.names, variables.MPICH.names, variables.SLURM.names)
_NAMES = variables.TORCHRUN.names


def torchrun_environment(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return torchrun's variables, whichever launcher set them; None if none did.

    MASTER_ADDR is used if set. Otherwise it is the first host of the Slurm step, or this host if all ranks run on it.

    Raises:
        CommError: ranks run on several hosts, and nothing says which of these rank 0 is on.
    """
    for launcher in _LAUNCHERS:
        if launcher[0] in environment and launcher[1] in environment:
            values = {
                name: environment[theirs]
                for name, theirs in zip(_NAMES, launcher, strict=True)
                if theirs in environment
            }
            if launcher is variables.SLURM.names:
                values["LOCAL_WORLD_SIZE"] = _tasks_of(int(values.get("LOCAL_WORLD_SIZE", "0")), environment)
            values["LOCAL_WORLD_SIZE"] = values.get("LOCAL_WORLD_SIZE") or values["WORLD_SIZE"]
            values.setdefault("LOCAL_RANK", "0" if values["WORLD_SIZE"] == "1" else values["RANK"])
            values["MASTER_ADDR"] = variables.MASTER_ADDR.get(environment) or _first_host(environment, values)
            values["MASTER_PORT"] = variables.MASTER_PORT.get(environment)
            return values
    return None


def _tasks_of(node: int, environment: Mapping[str, str]) -> str:
    """Return the number of ranks on a host from Slurm's list, such as ``2(x2),1``; empty if it is not known."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.SLURM_TASKS.first(environment))
    tasks = [count for count, times in counts for _ in range(int(times or 1))]
    return tasks[node] if node < len(tasks) else "".join(tasks[:1] if len(set(tasks)) == 1 else [])


def _first_host(environment: Mapping[str, str], values: Mapping[str, str]) -> str:
    """Return the first host of Slurm's list, such as ``node[03-07,9],other``."""
    if match := re.match(r"(?:[^\[,]|\[[^\]]*\])+", variables.SLURM_HOSTS.first(environment)):
        return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])
    if values["LOCAL_WORLD_SIZE"] == values["WORLD_SIZE"]:
        return "127.0.0.1"
    here, everywhere = values["LOCAL_WORLD_SIZE"], values["WORLD_SIZE"]
    raise CommError(
        f"{here} of {everywhere} ranks run on this host, and nothing says on which host rank 0 does: set "
        "MASTER_ADDR to it on all ranks, as in `mpirun -x MASTER_ADDR=host …`."
    )


class World:
    """All ranks of the default process group. Rank and size are never cached, as the group can be rebuilt."""

    @classmethod
    def init(cls, backend: Backend | str | None = None) -> World:
        """Attach to the default group, or create it from the launcher's environment (torchrun, mpirun, srun).

        Args:
            backend: The transport. None: NCCL if each rank of this host can have its own GPU, else Gloo. Ignored if
                the group already exists.

        Raises:
            CommError: no group exists, and the environment does not describe one.
        """
        wanted = None if backend is None else as_backend(backend)
        if dist.is_initialized():
            return cls()
        environment = torchrun_environment(os.environ)
        if environment is None:
            raise CommError(
                "No world to join: run this in a `%%distributed` cell or under torchrun, mpirun or srun. "
                "`World.mock(4).run(fn)` needs none of them."
            )
        os.environ.update(environment)
        local_ranks = int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
        selected = wanted or choose_backend(local_ranks)
        if selected is Backend.MOCK:
            raise InvalidArgumentError("backend must be 'gloo' or 'nccl'; use `World.mock(n)` for a mock world.")
        device = None
        if selected is Backend.NCCL:
            device = torch.device("cuda", int(environment.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        dist.init_process_group(selected.value, device_id=device)
        return cls()

    new = init

    @staticmethod
    def mock(world_size: int = 1, *, synchronous_sends: bool = False) -> MockWorld:
        """Create a world of ranks inside this process: `World.mock(4).run(fn)`.

        Args:
            world_size: Number of ranks.
            synchronous_sends: Whether a send completes only when its receiver asks for it, as for large messages on
                real ranks. Otherwise sends are buffered, which hides deadlocks of ranks that all send first.
        """
        from axon_nb.comm.mock_world import MockWorld

        return MockWorld(world_size, view=World, synchronous_sends=synchronous_sends)

    @property
    def backend(self) -> Backend:
        """The backend that carries the messages."""
        return self.default_group().backend

    def default_group(self) -> ProcessGroup:
        """Return the group of all ranks.

        Raises:
            WorldClosedError: the world is closed.
        """
        return resolve(None)

    def new_group(self, ranks: Iterable[int]) -> ProcessGroup:
        """Create a group of some ranks; every rank must call this, in the same order. See `ProcessGroup`."""
        return ProcessGroup(ranks)

    def rank(self) -> int:
        """Return this process's rank.

        Raises:
            WorldClosedError: the world is closed.
        """
        self._check_open()
        return dist.get_rank()

    def world_size(self) -> int:
        """Return the number of ranks.

        Raises:
            WorldClosedError: the world is closed.
        """
        self._check_open()
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """This process's index among the ranks of its host."""
        return int(os.environ.get("LOCAL_RANK", self.rank()))

    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.rank() == 0

    def barrier(self) -> None:
        """Wait until every rank has called `barrier`."""
        self._check_open()
        dist.barrier()

    def close(self) -> None:
        """Destroy the default group and all others. Not needed in cells: later cells use the same group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def _check_open() -> None:
        if not dist.is_initialized():
            raise WorldClosedError("The world is closed: call `World.init()` to create a new one.")

    def __repr__(self) -> str:
        if not dist.is_initialized():
            return "World(closed)"
        return f"World(rank={self.rank()}, world_size={self.world_size()}, backend={dist.get_backend()!r})"


def rank(group: GroupLike = None) -> int:
    """Return this process's rank in the group.

    Raises:
        NotInGroupError: this process is not a member.
    """
    return resolve(group).rank()


def world_size(group: GroupLike = None) -> int:
    """Return the number of ranks in the group."""
    return resolve(group).size()


def is_main_process(group: GroupLike = None) -> bool:
    """Whether this process is rank 0 of the group."""
    return rank(group) == 0
