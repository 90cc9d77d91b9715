"""Process groups, as seen by members and non-members, with their backends, reduce operations and handles."""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from axon_nb.comm.errors import CommError, InvalidArgumentError, InvalidRankError, NotInGroupError, WorldClosedError

_MOCK = "mock"
"""Part of the name of a mock world's backend in torch."""
# Immutable properties of torch's groups. Held weakly: a Gloo group that outlives `destroy_process_group` takes the
# process down when it is freed ("terminate called without an active exception").
_known: weakref.WeakKeyDictionary[Any, GroupInfo] = weakref.WeakKeyDictionary()
_ALIASES = {"avg": "average", "mean": "average", "prod": "product"}


class GroupInfo(NamedTuple):
    """The immutable properties of a group."""

    ranks: tuple[int, ...]
    """Global ranks of the members, ascending."""
    backend: Backend
    rank: int = -1
    """This process's rank in the group; -1 if it is not a member."""
    name: str = ""
    """torch's name of the group."""
    emits_spans: bool = False
    """Whether the group itself records spans for its communication."""


class ProcessGroup:
    """A group of ranks that communicate with each other.

    Creating one is a collective call: every rank of the world, member or not, must create it in the same order. Ranks
    in calls (`src`, `dst`) count within the group, from 0, in ascending order of the global ranks.

    Args:
        ranks: Global ranks: a list, a range, or any iterable of ints.

    Raises:
        InvalidRankError: a rank is not in the world or is duplicated, or `ranks` is empty.
        WorldClosedError: no world is initialized.
    """

    info: GroupInfo

    def __init__(self, ranks: Iterable[int]) -> None:
        if not dist.is_initialized():
            raise WorldClosedError("No world is initialized: call `World.init()` first.")
        members = validate_ranks(ranks, dist.get_world_size())
        made = dist.new_group(list(members))
        member = dist.get_rank() in members
        self._torch: Any = made if member else None
        self.info = _info_of(made, members) if member else GroupInfo(members, _backend_of(None))

    @classmethod
    def from_info(cls, torch_group: Any, info: GroupInfo) -> ProcessGroup:
        """Wrap a torch group whose properties are known; `torch_group` is None if this process is not a member."""
        self = cls.__new__(cls)
        self._torch = torch_group
        self.info = info
        return self

    @classmethod
    def wrap(cls, group: dist.ProcessGroup | None = None) -> ProcessGroup:
        """Wrap the default group, or a group created by torch.

        Raises:
            WorldClosedError: no default group exists.
        """
        if group is None and not dist.is_initialized():
            raise WorldClosedError(
                "No world is initialized: call `World.init()`, or run this in a `%%distributed` cell."
            )
        torch_group: Any = dist.group.WORLD if group is None else group
        return cls.from_info(torch_group, _info_of(torch_group, tuple(dist.get_process_group_ranks(torch_group))))

    @classmethod
    def from_backend(cls, backend: Any) -> ProcessGroup:
        """Return the group of a backend created by hand, such as one of `MockBackend.create_world(4)`."""
        ranks, group = tuple(range(backend.world_size())), backend.group
        return cls.from_info(group, GroupInfo(ranks, Backend(backend.kind), group.rank(), group.group_name))

    @classmethod
    def mock(cls) -> ProcessGroup:
        """Return a group of this process alone, without a world: every collective completes at once."""
        from axon_nb.comm.mock import MockBackend

        return cls.from_backend(MockBackend.create_world(1)[0])

    @property
    def torch_group(self) -> Any:
        """The underlying torch group.

        Raises:
            NotInGroupError: this rank is not a member.
        """
        self._check_member()
        return self._torch

    def _check_member(self) -> None:
        if self._torch is None:
            raise NotInGroupError(
                f"Rank {dist.get_rank()} is not a member of the group of ranks {list(self.ranks)}: guard the call with "
                "`if group.contains(rank)`, or use the default group."
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, ascending."""
        return self.info.ranks

    @property
    def backend(self) -> Backend:
        """The backend that carries the group's messages."""
        return self.info.backend

    def rank(self) -> int:
        """Return this process's rank in the group, from 0.

        Raises:
            NotInGroupError: this process is not a member.
        """
        self._check_member()
        return self.info.rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)

    world_size = size

    def contains(self, rank: int) -> bool:
        """Whether `rank` (global) is a member."""
        return rank in self.ranks

    @property
    def is_member(self) -> bool:
        """Whether this process is a member."""
        return self._torch is not None

    def check_rank(self, rank: int, name: str) -> int:
        """Return `rank` if it is valid within the group.

        Raises:
            InvalidRankError: the group has no such rank.
        """
        if type(rank) is not int:
            rank = _as_rank(rank, name)
        if not 0 <= rank < len(self.ranks):
            mapped = f" (global rank {rank} is rank {self.ranks.index(rank)} there)" if rank in self.ranks else ""
            raise InvalidRankError(
                f"{name} must be 0 to {len(self.ranks) - 1} in the group of ranks {list(self.ranks)}; "
                f"got {rank}{mapped}."
            )
        return rank

    def __repr__(self) -> str:
        who = f"rank={self.rank()}" if self.is_member else "not a member"
        return f"ProcessGroup({who}, ranks={list(self.ranks)}, backend={self.backend.value!r})"


GroupLike = ProcessGroup | dist.ProcessGroup | None
"""Types that `group=` accepts: our group, torch's, or None for the default group."""


def resolve(group: Any) -> ProcessGroup:
    """Return the group that `group=` means: a World stands for its default group, a 1-D mesh for its only axis.

    Raises:
        InvalidArgumentError: `group` is not a group.
        NotInGroupError: `group` is torch's placeholder for ranks that are not members.
        WorldClosedError: no default group exists.
    """
    if isinstance(group, ProcessGroup):
        return group
    if group is not None and callable(default := getattr(group, "default_group", None)):
        selected: ProcessGroup = default()
        return selected
    torch_group: Any = dist.group.WORLD if group is None else group
    try:
        info = None if torch_group is None else _known.get(torch_group)
    except TypeError:
        raise _no_group(group) from None
    if info is not None:
        return ProcessGroup.from_info(torch_group, info)
    if torch_group is not None and not isinstance(torch_group, dist.ProcessGroup):
        return resolve(_of_mesh(torch_group))
    wrapped = ProcessGroup.wrap(torch_group)
    _known[wrapped.torch_group] = wrapped.info
    return wrapped


def rank_device(group: ProcessGroup) -> torch.device:
    """Return the device where this rank computes, as far as the group knows it; the CPU otherwise.

    A visible GPU says nothing: the ranks of a Gloo or mock world may be on CPUs.
    """
    if group.backend is Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    known: torch.device | None = getattr(group.torch_group, "rank_device", None)
    return torch.device("cpu") if known is None else known


def _of_mesh(mesh: Any) -> Any:
    if not callable(getattr(mesh, "get_group", None)):
        raise _no_group(mesh)
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        axes = ", ".join(map(str, names))
        raise InvalidArgumentError(
            f"group: the mesh has several axes ({axes}); pass one of them, such as mesh[{names[0]!r}]."
        )
    return mesh.get_group()


def _no_group(argument: Any) -> CommError:
    nobody = dist.GroupMember.NON_GROUP_MEMBER
    if type(argument) is type(nobody) and argument == nobody:
        return NotInGroupError("This rank is not a member of the group: `new_group` returned torch's placeholder.")
    return InvalidArgumentError(
        "group must be a ProcessGroup, a World, a mesh with one axis, a torch group, or None for all ranks; got "
        f"{argument!r}. For a group of some ranks, call `ProcessGroup([0, 2])` on every rank."
    )


def validate_ranks(ranks: Iterable[int], world_size: int) -> tuple[int, ...]:
    """Validate the ranks of a new group and return them sorted.

    Raises:
        InvalidRankError: a rank is not in the world or is duplicated, or there is none.
    """
    if not isinstance(ranks, Iterable):
        raise InvalidRankError(f"ranks must be a list of ranks, such as [0, 1]; got {ranks!r}.")
    members = [_as_rank(rank, "ranks") for rank in ranks]
    if not members:
        raise InvalidRankError("ranks must name at least one rank; got none.")
    for rank in members:
        if not 0 <= rank < world_size:
            raise InvalidRankError(f"ranks must be 0 to {world_size - 1}; got {rank}.")
    if len(set(members)) < len(members):
        raise InvalidRankError(f"Duplicate rank in {list(members)}.")
    return tuple(sorted(members))


def _as_rank(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidRankError(f"{name}: a rank must be an integer from 0; got {value!r}.") from None


def _info_of(group: Any, ranks: tuple[int, ...]) -> GroupInfo:
    emits_spans = bool(getattr(group, "emits_spans", False))
    return GroupInfo(ranks, _backend_of(group), int(group.rank()), str(group.group_name), emits_spans)


def _backend_of(group: Any) -> Backend:
    name = str(dist.get_backend(group)).lower()
    if _MOCK in name:
        return Backend.MOCK
    return Backend.NCCL if "nccl" in name else Backend.GLOO


def forget(torch_group: Any) -> None:
    """Forget what is known about a torch group, because it has other ranks now."""
    _known.pop(torch_group, None)


class Backend(enum.StrEnum):
    """The transport that carries messages between ranks."""

    GLOO = "gloo"
    """Processes on CPUs; accepts CUDA tensors too, copied through host memory."""
    NCCL = "nccl"
    """Processes with one GPU each."""
    MOCK = "mock"
    """All ranks in this process, one at a time; deterministic."""


class ReduceOp(enum.Enum):
    """How values from several ranks are combined."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVERAGE = "average"
    """The mean over ranks; not defined for integers, which cannot represent it."""

    torch_op: dist.ReduceOp.RedOpType
    """torch's operation; an average is a sum that is divided afterwards."""

    __hash__ = object.__hash__  # the enum's own is written in Python and slows down every call


ReduceOp.SUM.torch_op = ReduceOp.AVERAGE.torch_op = dist.ReduceOp.SUM


ReduceOp.PRODUCT.torch_op = dist.ReduceOp.PRODUCT


ReduceOp.MIN.torch_op = dist.ReduceOp.MIN


ReduceOp.MAX.torch_op = dist.ReduceOp.MAX


_FROM_TORCH: dict[object, ReduceOp] = {op.torch_op: op for op in ReduceOp if op is not ReduceOp.AVERAGE}


_FROM_TORCH[dist.ReduceOp.AVG] = ReduceOp.AVERAGE


def as_op(value: object) -> ReduceOp:
    """Convert one of our operations, one of torch's, or a name.

    Raises:
        InvalidArgumentError: the operation is unknown.
    """
    if type(value) is ReduceOp:
        return value
    name = value.lower() if isinstance(value, str) else ""
    for known, op in _FROM_TORCH.items():
        if value == known or _ALIASES.get(name, name) == op.value:
            return op
    raise InvalidArgumentError(
        f"op must be one of {', '.join(f'ReduceOp.{op.name}' for op in ReduceOp)}; got {value!r}."
    )


def as_backend(backend: Backend | str) -> Backend:
    """Return the backend with this name.

    Raises:
        InvalidArgumentError: the backend is unknown.
    """
    try:
        return Backend(str(backend).lower())
    except ValueError:
        raise InvalidArgumentError(
            f"backend must be one of {', '.join(map(repr, map(str, Backend)))}; got {backend!r}."
        ) from None


def choose_backend(local_ranks: int) -> Backend:
    """Choose NCCL if each of the `local_ranks` on this host can have its own GPU, else Gloo."""
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local_ranks
    return Backend.NCCL if has_gpus else Backend.GLOO


class Handle:
    """One communication in progress.

    Args:
        work: torch's handle; None if there is nothing to wait for.
        finish: Called once, when the communication has completed; returns the result.
    """

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work = work
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for completion and return what the call returns without `async_op`. Later calls return the same."""
        if self._finish is not None:
            if self._work is not None:
                self._work.wait()
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finish is None or self._work is None or bool(self._work.is_completed())

    is_completed = done
