"""Base class of process groups written in Python: the name, size and rank that torch asks for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch's stubs describe the C++ side, which is typed more strictly than what calls it.
_Base: Any = dist.ProcessGroup


class PythonProcessGroup(_Base):
    """A process group that answers torch's queries and implements no communication.

    Args:
        rank: This rank within the group.
        size: Number of ranks.
        name: torch's name of the group.
        backend: Name of the backend. Must not be that of a C++ class such as "gloo": DDP's logger would look for it.
    """

    def __init__(self, rank: int, size: int, name: str, *, backend: str) -> None:
        super().__init__(rank, size)
        self._backend_name = backend
        self._own_rank = rank
        self._size = size
        self._name = name
        self._desc = ""

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return self._backend_name

    def name(self) -> str:
        """Return the name that torch prints."""
        return self._backend_name

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._own_rank

    getSize = size
    getRank = rank

    def resize(self, rank: int, size: int) -> None:
        """Change rank and size, while nothing communicates."""
        self._own_rank, self._size = rank, size

    def shutdown(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Torch's description of the group."""
        return self._desc

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    def _get_sequence_number_for_group(self) -> int:
        return 0

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]
