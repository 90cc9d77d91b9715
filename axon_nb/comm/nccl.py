"""NCCL by itself: version, unique ids, and worlds over GPUs that are made by hand.

Importable anywhere; what needs NCCL or a GPU raises `NcclError` with the reason where there is none. Training does not
need this module: `World.init()` chooses NCCL by itself. It is for worlds that no launcher has made: all GPUs of one
process, or processes that pass a unique id to each other.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.errors import InvalidRank, NcclError
from axon_nb.comm.nccl_group import NcclGroup, register

__all__ = ["NcclBackend", "NcclUniqueId", "devices", "is_available", "nccl_version", "why_not"]


def why_not() -> str:
    """Why NCCL cannot be used here; empty when it can."""
    if not dist.is_nccl_available():
        return f"this build of torch ({torch.__version__}) has no NCCL: install one for CUDA, or use Backend.GLOO"
    if not torch.cuda.is_available():
        return "no CUDA device is visible here: use Backend.GLOO, or look at CUDA_VISIBLE_DEVICES"
    return ""


def is_available() -> bool:
    """Whether NCCL can be used here."""
    return not why_not()


def _require() -> None:
    if reason := why_not():
        raise NcclError(f"NCCL: {reason}.")


def nccl_version() -> tuple[int, int, int]:
    """NCCL's version: major, minor, patch.

    Raises:
        NcclError: there is no NCCL.
    """
    _require()
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major), int(minor), int(patch)


def devices() -> list[str]:
    """The CUDA devices that are visible, by index: their names.

    Raises:
        NcclError: there is none.
    """
    _require()
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


@dataclass(frozen=True, slots=True)
class NcclUniqueId:
    """What all ranks of one NCCL world share; one rank makes it and sends it to the others by any means."""

    data: bytes

    def to_text(self) -> str:
        """As text, for an environment variable or a file."""
        return base64.b64encode(self.data).decode()

    @classmethod
    def from_text(cls, text: str) -> NcclUniqueId:
        """From `to_text`.

        Raises:
            NcclError: it is no such text.
        """
        try:
            return cls(base64.b64decode(text, validate=True))
        except ValueError:
            raise NcclError(f"{text[:40]!r} is no unique id: `NcclUniqueId.to_text()` makes one.") from None


class NcclBackend:
    """One rank of an NCCL world; `ProcessGroup.from_backend` makes a group of it.

    Args:
        unique_id: The same on all ranks.
        rank: This rank.
        world_size: Number of ranks.
        device: Index of the CUDA device it computes on; every rank has one of its own.

    The constructor returns when all ranks are there.

    Raises:
        NcclError: there is no NCCL, or it refuses.
        InvalidRank: the world has no such rank.
    """

    kind = "nccl"

    def __init__(self, unique_id: NcclUniqueId, rank: int, world_size: int, device: int) -> None:
        _require()
        if not 0 <= rank < world_size:
            raise InvalidRank(f"rank {rank}: a world of {world_size} has ranks 0 to {world_size - 1}.")
        if not 0 <= device < torch.cuda.device_count():
            raise NcclError(f"device {device}: {torch.cuda.device_count()} CUDA devices are visible, from 0.")
        self.device = torch.device("cuda", device)
        try:
            with torch.cuda.device(self.device):
                communicator = torch.cuda.nccl.init_rank(world_size, unique_id.data, rank)
        except RuntimeError as error:
            raise NcclError(f"NCCL: rank {rank} of {world_size} could not join: {error}.") from None
        self.group = NcclGroup(communicator, rank, world_size, self.device)
        register(self.group)

    @staticmethod
    def generate_unique_id() -> NcclUniqueId:
        """A new id, for one world.

        Raises:
            NcclError: there is no NCCL.
        """
        _require()
        return NcclUniqueId(bytes(torch.cuda.nccl.unique_id()))

    @classmethod
    def create_world(cls, devices: Sequence[int]) -> list[NcclBackend]:
        """A world over GPUs of this host, in this process: one rank a device.

        Calls are made on every rank's group with `async_op=True` before one is waited for.

        Raises:
            NcclError: there is no NCCL, a device is not there or is there twice.
        """
        _require()
        if len(set(devices)) < len(devices) or not devices:
            raise NcclError(f"devices {list(devices)}: each rank has a GPU of its own, and there is at least one.")
        unique_id, size = cls.generate_unique_id(), len(devices)
        made: dict[int, Any] = {}

        def join(rank: int) -> None:
            try:
                made[rank] = cls(unique_id, rank, size, devices[rank])
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
        """This rank."""
        return self.group.rank()

    def world_size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @staticmethod
    def nccl_version() -> tuple[int, int, int]:
        """NCCL's version: major, minor, patch."""
        return nccl_version()

    def synchronize(self) -> None:
        """Wait until everything that was begun on this rank's device is over."""
        torch.cuda.synchronize(self.device)
