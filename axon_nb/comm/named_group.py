"""What torch asks any process group that is written in Python: its name, its size, this process's rank in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["NamedGroup"]

# torch's stubs describe the C++ side; what is called from there is looser.
_Base: Any = dist.ProcessGroup


class NamedGroup(_Base):
    """A group that can be asked, and does nothing yet.

    Args:
        rank: This rank within the group.
        size: Number of ranks.
        name: torch's name of the group.
        backend: The backend's name; not that of a C++ class such as "gloo", which DDP's logger would look for here.
    """

    def __init__(self, rank: int, size: int, name: str, *, backend: str) -> None:
        super().__init__(rank, size)
        self._backend_name = backend
        self._own_rank = rank
        self._size = size
        self._name = name
        self._desc = ""

    def getBackendName(self) -> str:
        """The backend's name."""
        return self._backend_name

    def name(self) -> str:
        """What torch prints."""
        return self._backend_name

    def size(self) -> int:
        """Number of ranks in the group."""
        return self._size

    def rank(self) -> int:
        """This rank in the group."""
        return self._own_rank

    getSize = size
    getRank = rank

    def shutdown(self) -> None:
        """Nothing to do."""

    def abort(self) -> None:
        """Nothing to do."""

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Torch's description of the group."""
        return self._desc

    def getGroupName(self) -> str:
        """Torch's name of the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """Torch's description of the group."""
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
