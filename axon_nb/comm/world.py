"""The world: all ranks that belong together."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from axon_nb.comm.errors import CommError, WorldClosed
from axon_nb.comm.group import ProcessGroup, resolve
from axon_nb.comm.kinds import Backend, as_backend, choose_backend
from axon_nb.comm.launch_env import torchrun_environment
from axon_nb.comm.mock_world import MockWorld

__all__ = ["World"]


class World:
    """All ranks of the default process group. Rank and size are asked, never cached: a group can be formed anew."""

    @classmethod
    def init(cls, backend: Backend | str | None = None) -> World:
        """Attach to the default group, or form it from the launcher's environment (torchrun, mpirun, srun).

        Args:
            backend: What carries the messages; None: NCCL when every rank of the host can have a GPU, else Gloo.
                Ignored when the group is already there.

        Raises:
            CommError: no group is there and the environment does not say who is in it.
        """
        wanted = None if backend is None else as_backend(backend)
        if dist.is_initialized():
            return cls()
        environment = torchrun_environment(os.environ)
        if environment is None:
            raise CommError(
                "There is no world to join: run this in a `%%distributed` cell or under torchrun, mpirun or srun; "
                "`World.mock(4).run(fn)` needs none of them."
            )
        os.environ.update(environment)
        local_ranks = int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
        chosen = wanted or choose_backend(local_ranks)
        if chosen is Backend.MOCK:
            raise CommError("A mock world is made with `World.mock(n)`.")
        device = None
        if chosen is Backend.NCCL:
            device = torch.device("cuda", int(environment.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        dist.init_process_group(chosen.value, device_id=device)
        return cls()

    new = init

    @staticmethod
    def mock(n: int = 1) -> MockWorld:
        """A world of `n` ranks inside this process: `World.mock(4).run(fn)`."""
        return MockWorld(n, view=World)

    @property
    def backend(self) -> Backend:
        """What carries the messages."""
        return self.default_group().backend

    def default_group(self) -> ProcessGroup:
        """The group of all ranks.

        Raises:
            WorldClosed: there is none any more.
        """
        return resolve(None)

    def new_group(self, ranks: Iterable[int]) -> ProcessGroup:
        """A group of some ranks; every rank of the world makes it, in the same order. See `ProcessGroup`."""
        return ProcessGroup(ranks)

    def rank(self) -> int:
        """This process's rank.

        Raises:
            WorldClosed: there is no world any more.
        """
        self._check_open()
        return dist.get_rank()

    def world_size(self) -> int:
        """Number of ranks.

        Raises:
            WorldClosed: there is no world any more.
        """
        self._check_open()
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """Index among the ranks of this host."""
        return int(os.environ.get("LOCAL_RANK", self.rank()))

    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.rank() == 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._check_open()
        dist.barrier()

    def close(self) -> None:
        """Leave the default group and all others; in a cell the group stays, as the next cells need it."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def _check_open() -> None:
        if not dist.is_initialized():
            raise WorldClosed("The world is closed: `World.init()` forms a new one.")

    def __repr__(self) -> str:
        if not dist.is_initialized():
            return "World(closed)"
        return f"World(rank={self.rank()}, world_size={self.world_size()}, backend={dist.get_backend()!r})"
