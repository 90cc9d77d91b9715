"""Direct access to NCCL: version, unique ids, and hand-made worlds over GPUs.

Experimental: training does not need this module, as `World.init()` chooses NCCL where possible. Use it for worlds that
no launcher created: all GPUs in one process, or processes that exchange a unique id themselves. It can be imported
anywhere; what needs NCCL or a GPU raises `NcclError` with the reason if there is none.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.errors import InvalidRankError, NcclError
from axon_nb.comm.nccl.group import NcclGroup, register
from axon_nb.comm.nccl.messages import join_world


def unavailable_reason() -> str:
    """Return why NCCL cannot be used here; empty if it can."""
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} is built without NCCL; install a CUDA build, or use Backend.GLOO"
    if not torch.cuda.is_available():
        return "no CUDA device is visible; check CUDA_VISIBLE_DEVICES, or use Backend.GLOO"
    return ""


def is_available() -> bool:
    """Whether NCCL can be used here."""
    return not unavailable_reason()


def _require_nccl() -> None:
    if reason := unavailable_reason():
        raise NcclError(f"NCCL is unavailable: {reason}.")


def nccl_version() -> tuple[int, int, int]:
    """Return NCCL's version: major, minor, patch.

    Raises:
        NcclError: NCCL is unavailable.
    """
    _require_nccl()
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major), int(minor), int(patch)


def devices() -> list[str]:
    """Return the names of the visible CUDA devices, by index.

    Raises:
        NcclError: NCCL is unavailable.
    """
    _require_nccl()
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


@dataclass(frozen=True, slots=True)
class NcclUniqueId:
    """The id that all ranks of one NCCL world share; one rank generates it and sends it to the others."""

    data: bytes

    def to_text(self) -> str:
        """Encode as text, for an environment variable or a file."""
        return base64.b64encode(self.data).decode()

    @classmethod
    def from_text(cls, text: str) -> NcclUniqueId:
        """Decode the output of `to_text`.

        Raises:
            NcclError: `text` is not a unique id.
        """
        try:
            return cls(base64.b64decode(text, validate=True))
        except ValueError:
            raise NcclError(f"{text[:40]!r} is not a unique id; create one with `NcclUniqueId.to_text()`.") from None


class NcclBackend:
    """One rank of a hand-made NCCL world; pass it to `ProcessGroup.from_backend`.

    Args:
        unique_id: The same on all ranks.
        rank: This rank.
        world_size: Number of ranks.
        device: Index of the rank's CUDA device; each rank needs its own.
        threaded: Whether other ranks of the world are in this process.

    The constructor returns when all ranks have joined.

    Raises:
        NcclError: NCCL is unavailable or reported an error.
        InvalidRankError: `rank` is not in the world.
    """

    kind = "nccl"

    def __init__(
        self, unique_id: NcclUniqueId, rank: int, world_size: int, device: int, *, threaded: bool = False
    ) -> None:
        _require_nccl()
        if not 0 <= rank < world_size:
            raise InvalidRankError(f"rank must be 0 to {world_size - 1}; got {rank}.")
        if not 0 <= device < torch.cuda.device_count():
            raise NcclError(f"device must be 0 to {torch.cuda.device_count() - 1}; got {device}.")
        self.device = torch.device("cuda", device)
        try:
            with torch.cuda.device(self.device):
                communicator = join_world(world_size, unique_id.data, rank)
        except NcclError as error:
            raise NcclError(f"rank {rank} of {world_size} failed to join: {error}") from None
        self.group = NcclGroup(communicator, rank, world_size, self.device, threaded=threaded)
        register(self.group)

    @staticmethod
    def generate_unique_id() -> NcclUniqueId:
        """Generate the id of a new world.

        Raises:
            NcclError: NCCL is unavailable.
        """
        _require_nccl()
        return NcclUniqueId(bytes(torch.cuda.nccl.unique_id()))

    @classmethod
    def create_world(cls, devices: Sequence[int]) -> list[NcclBackend]:
        """Create a world over GPUs of this host in this process, with one rank per device.

        Make each call on every rank's group with `async_op=True` before waiting for one.

        Raises:
            NcclError: NCCL is unavailable, or a device does not exist or is listed twice.
        """
        _require_nccl()
        if len(set(devices)) < len(devices) or not devices:
            raise NcclError(f"devices must list at least one GPU, each once; got {list(devices)}.")
        unique_id, size = cls.generate_unique_id(), len(devices)
        made: dict[int, Any] = {}

        def join(rank: int) -> None:
            try:
                made[rank] = cls(unique_id, rank, size, devices[rank], threaded=size > 1)
            except NcclError as error:
                made[rank] = error

        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(size):
            if isinstance(made[rank], NcclError):
                raise made[rank]
        return [made[rank] for rank in range(size)]

    def rank(self) -> int:
        """Return this rank."""
        return self.group.rank()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.group.size()

    @staticmethod
    def nccl_version() -> tuple[int, int, int]:
        """Return NCCL's version: major, minor, patch."""
        return nccl_version()

    def synchronize(self) -> None:
        """Wait until all work on this rank's device has finished."""
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the world, once its work is done; call it on every rank. Its group then raises `NcclError`."""
        self.group.close()
