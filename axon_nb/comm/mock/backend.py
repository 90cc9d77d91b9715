"""The create-world form: one backend a rank, all driven by the caller's own thread."""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist

from axon_nb.comm.errors import InvalidRank
from axon_nb.comm.mock.group import NAME, MockGroup
from axon_nb.comm.mock.hub import Hub

__all__ = ["MockBackend"]

_numbers = itertools.count()


class MockBackend:
    """One rank of a simulated world; `ProcessGroup.from_backend` makes a group of it."""

    kind = "mock"

    def __init__(self, hub: Hub, rank: int) -> None:
        self.group = MockGroup(hub, rank, None, f"axon_mock_{next(_numbers)}")
        world: Any = dist.distributed_c10d._world
        # What torch's functions look up for any group.
        world.pg_map[self.group] = (NAME, None)
        world.pg_names[self.group] = self.group.group_name
        world.pg_group_ranks[self.group] = {member: member for member in hub.ranks}
        world.pg_backend_config[self.group] = f"cpu:{NAME}"

    @classmethod
    def create_world(cls, n: int) -> list[MockBackend]:
        """The backends of a world of `n` ranks.

        Raises:
            InvalidRank: n is below 1.
        """
        if n < 1:
            raise InvalidRank(f"a world of {n} ranks: it has at least 1.")
        hub = Hub(tuple(range(n)))
        return [cls(hub, rank) for rank in range(n)]

    def rank(self) -> int:
        """This backend's rank."""
        return self.group.rank()

    def world_size(self) -> int:
        """Number of ranks."""
        return self.group.size()
