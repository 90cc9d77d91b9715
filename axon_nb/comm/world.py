"""The world: all ranks that belong together."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["World"]


class World:
    """All ranks of the default process group. Rank and size are asked, never cached: a group can be formed anew."""

    @classmethod
    def init(cls, backend: str | None = None) -> World:
        """Attach to the default group, or form it from the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, …).

        Args:
            backend: ``gloo`` or ``nccl``; None lets torch choose. Ignored when the group is already there.
        """
        if not dist.is_initialized():
            dist.init_process_group(backend)
        return cls()

    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank()

    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.rank() == 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier()

    def __repr__(self) -> str:
        return f"World(rank={self.rank()}, world_size={self.world_size()}, backend={dist.get_backend()!r})"
