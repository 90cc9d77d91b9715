"""What process groups written in Python share: the answers that torch asks for, and staging of CUDA tensors.

Tensors are staged in host memory for operations that Gloo runs on host memory alone. It would read and write the
address of a CUDA tensor as if it were host memory. Under torchrun, too, DTensor's `full_tensor`, a coalesced gather,
ends the process (SIGSEGV, torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# torch's stubs describe the C++ side, which is typed more strictly than what calls it.
_Base: Any = dist.ProcessGroup
_STAGED: dict[str, tuple[Any, Any]] = {
    "send": (0, None),
    "recv": (None, 0),
    "recv_anysource": (None, 0),
    "allreduce_coalesced": (0, 0),
    "allgather_coalesced": (1, 0),
    "all_gather_single_coalesced": (1, 0),
    "allgather_into_tensor_coalesced": (1, 0),
}
"""Which arguments of an operation that Gloo runs on host memory alone are its inputs and its outputs."""


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


def register_group(group: PythonProcessGroup, device_type: str) -> None:
    """Enter a group of all ranks that was made by hand into the tables in which torch's functions look up groups."""
    world: Any = dist.distributed_c10d._world
    name = group.getBackendName()
    world.pg_map[group] = (name, None)
    world.pg_names[group] = group.group_name
    world.pg_group_ranks[group] = {member: member for member in range(group.size())}
    world.pg_backend_config[group] = f"{device_type}:{name}"


def forget_group(group: PythonProcessGroup) -> None:
    """Remove it from these tables."""
    world: Any = dist.distributed_c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)


def stage_on_host(
    name: str, args: tuple[Any, ...], on_finish: Callable[[Any], None]
) -> tuple[tuple[Any, ...], Callable[[Any], None]]:
    """Replace tensors that are not on the CPU by copies in host memory, where Gloo does not do it itself.

    Args:
        name: The operation.
        args: Its arguments.
        on_finish: Called when the operation has finished.

    Returns:
        The arguments to use, and what to call when the operation has finished: it copies outputs back.
    """
    if name not in _STAGED:
        return args, on_finish
    inputs, outputs = _STAGED[name]
    staged, copied = list(args), list[tuple[torch.Tensor, torch.Tensor]]()
    for place in {inputs, outputs} - {None}:
        pairs = copied if place == outputs else []
        staged[place] = _on_host(args[place], pairs, reads=place == inputs)

    def copy_back(call: Any) -> None:
        with torch.no_grad():  # a pipeline stage receives into leaves that require a gradient
            for tensor, host in copied:
                tensor.copy_(host)
        on_finish(call)

    return tuple(staged), copy_back if copied else on_finish


def _on_host(value: Any, copied: list[tuple[torch.Tensor, torch.Tensor]], *, reads: bool) -> Any:
    """Return a tensor, or nested lists of them, in host memory; add what was copied to `copied`."""
    if not isinstance(value, torch.Tensor):
        return [_on_host(one, copied, reads=reads) for one in value]
    if value.is_cpu:
        return value
    # Pinned memory is copied to and from a GPU without another copy.
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.is_cuda)
    copied.append((value, host))
    if reads:
        with torch.no_grad():
            host.copy_(value)
    return host
