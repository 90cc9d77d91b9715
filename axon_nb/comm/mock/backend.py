"""`MockBackend.create_world`: one backend per rank, all driven by the caller's thread."""

from __future__ import annotations

import uuid
from typing import Any

import torch.distributed as dist

from axon_nb.comm.errors import InvalidRankError
from axon_nb.comm.mock.group import NAME, MockGroup
from axon_nb.comm.mock.hub import Hub


class MockBackend:
    """One rank of a simulated world; pass it to `ProcessGroup.from_backend`."""

    kind = "mock"

    def __init__(self, hub: Hub, rank: int) -> None:
        self.group = MockGroup(hub, rank, None, f"axon_mock_{uuid.uuid4().hex}")
        world: Any = dist.distributed_c10d._world
        # The tables that torch's functions use to look up groups.
        world.pg_map[self.group] = (NAME, None)
        world.pg_names[self.group] = self.group.group_name
        world.pg_group_ranks[self.group] = {member: member for member in hub.ranks}
        world.pg_backend_config[self.group] = f"cpu:{NAME}"

    @classmethod
    def create_world(cls, world_size: int) -> list[MockBackend]:
        """Return the backends of a world of `world_size` ranks.

        Raises:
            InvalidRankError: `world_size` is below 1.
        """
        if world_size < 1:
            raise InvalidRankError(f"world_size must be at least 1; got {world_size}.")
        hub = Hub(tuple(range(world_size)))
        return [cls(hub, rank) for rank in range(world_size)]

    def rank(self) -> int:
        """Return this backend's rank."""
        return self.group.rank()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.group.size()
