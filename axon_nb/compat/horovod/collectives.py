"""`init` and the queries of ranks, reductions, `allgather`, `alltoall` and `broadcast`, with the gradients of Horovod.

Ranks exchange a digest of the call before each collective, which finds mismatches and serves joined ranks. A digest of
0 says that the rank has joined. A joined rank takes part in reductions with zeros, as in Horovod.
"""

from __future__ import annotations

import atexit
import enum
import hashlib
import os
import socket
import warnings
import weakref
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import Struct, field
from torch._C._distributed_c10d import HashStore

from axon_nb import comm
from axon_nb.comm import World, all_gather, all_reduce
from axon_nb.comm.group import rank_device, resolve
from axon_nb.comm.world import torchrun_environment
from axon_nb.errors import AxonError, UsageError

# By default group: the ranks of a mock world share one process. Weak references, as groups must not be kept alive
# after the default group was destroyed: Gloo would crash the process.
_states: weakref.WeakKeyDictionary[Any, State] = weakref.WeakKeyDictionary()


class HorovodInternalError(AxonError, RuntimeError):
    """Ranks called Horovod differently; raised on every rank that called it."""


class NotInitializedError(UsageError):
    """Horovod has not been initialized."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class NotOfferedError(UsageError, NotImplementedError):
    """A part of Horovod that is not offered; the message names an alternative."""


class State(Struct):
    """Horovod's state on one rank."""

    rank: int
    hosts: list[str]
    """The host of each rank."""
    is_owner: bool
    """Whether `init` created the default group, so that `shutdown` destroys it."""
    present: list[int] = field(default_factory=list)
    """Ranks that had not joined at the last collective."""


def init() -> None:
    """Initialize Horovod on all ranks of a cell, torchrun, mpirun or srun, or in this single process.

    Every rank makes the call. Call it again on every rank after one was replaced.
    """
    previous = _find()
    is_owner = previous is not None and previous.is_owner
    if not dist.is_initialized():
        is_owner = True
        if torchrun_environment(os.environ) is None:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        else:
            World.init()
        atexit.register(shutdown)
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    _states[dist.group.WORLD] = State(dist.get_rank(), hosts, is_owner, list(range(len(hosts))))


def _find() -> State | None:
    return _states.get(dist.group.WORLD) if dist.is_initialized() else None


def current() -> State:
    """Return Horovod's state on this rank.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
    """
    state = _find()
    if state is None:
        raise NotInitializedError
    return state


def shutdown() -> None:
    """Shut down Horovod on this rank. In a cell the ranks and their default group stay."""
    state = _find()
    if state is None:
        return
    _states.pop(dist.group.WORLD)
    if state.is_owner:
        atexit.unregister(shutdown)
        dist.destroy_process_group()


def is_initialized() -> bool:
    """Whether Horovod is initialized."""
    return _find() is not None


def size() -> int:
    """Return the number of ranks."""
    return len(current().hosts)


def rank() -> int:
    """Return this process's rank."""
    return current().rank


def local_size() -> int:
    """Return the number of ranks on this rank's host."""
    state = current()
    return state.hosts.count(state.hosts[state.rank])


def local_rank() -> int:
    """Return this process's rank on its host."""
    state = current()
    return state.hosts[: state.rank].count(state.hosts[state.rank])


class Call(NamedTuple):
    """What all ranks must pass alike."""

    kind: str
    """Function of Horovod, such as ``allreduce``."""
    name: str | None
    items: tuple[str, ...]
    """Operation, dtype and shape of each tensor, in words."""
    buffers: tuple[tuple[int, torch.dtype, str], ...] = ()
    """Number of elements, dtype and device type of what is summed; empty if joined ranks cannot take part."""

    @property
    def title(self) -> str:
        """The call as the user wrote it."""
        return f"hvd.{self.kind}" if self.name is None else f"hvd.{self.kind} {self.name!r}"


def describe(tensor: torch.Tensor, *, any_rows: bool = False) -> str:
    """Describe dtype and shape; with `any_rows` without the size of dim 0, which may differ between ranks."""
    shape = str(tuple(tensor.shape))
    if any_rows:
        shape = f"({', '.join(['any', *map(str, tensor.shape[1:])])})"
    return f"{tensor.dtype} of shape {shape}"


def agree(call: Call) -> None:
    """Ensure that all ranks that have not joined make the same call; ranks that have joined follow.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        HorovodInternalError: Ranks call differently, or a rank has joined and only `allreduce` works.
    """
    state = current()
    digests = _exchange(state, int.from_bytes(hashlib.blake2b(repr(call).encode(), digest_size=7).digest()) + 1)
    if len(set(digests) - {0}) > 1:
        calls: list[Any] = [None] * len(digests)
        dist.all_gather_object(calls, call)
        raise HorovodInternalError(_mismatch({rank: each for rank, each in enumerate(calls) if each is not None}))
    joined = [rank for rank, digest in enumerate(digests) if digest == 0]
    if joined:
        dist.broadcast_object_list([call], src=state.present[0])
        if not call.buffers:
            raise HorovodInternalError(
                f"{call.title}: rank {joined[0]} called hvd.join(), and only hvd.allreduce works then."
            )


def join() -> int:
    """Wait until all ranks have called this; meanwhile take part in `allreduce` and `step` of the others with zeros.

    Returns:
        The rank that joined last; the highest of several.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
    """
    state = current()
    while True:
        last = state.present[-1]
        digests = _exchange(state, 0)
        if not any(digests):
            state.present = list(range(len(digests)))
            return last
        if len(set(digests) - {0}) > 1:
            dist.all_gather_object([None] * len(digests), None)
            continue
        calls: list[Any] = [None]
        dist.broadcast_object_list(calls, src=state.present[0])
        sum_buffers([torch.zeros(n, dtype=dtype, device=device) for n, dtype, device in calls[0].buffers])


def sum_buffers(buffers: Iterable[torch.Tensor]) -> None:
    """Sum flat tensors over all ranks, in place."""
    for handle in [all_reduce(buffer, async_op=True) for buffer in buffers]:
        handle.wait()


def _exchange(state: State, digest: int) -> list[int]:
    header = torch.tensor([digest], device=rank_device(resolve(None)))
    digests: list[int] = all_gather(header).tolist()
    if any(digests):
        state.present = [rank for rank, each in enumerate(digests) if each]
    return digests


def _mismatch(calls: dict[int, Call]) -> str:
    """Say what ranks passed where their calls differ first; of ranks that passed the same, only the first is named."""
    titles = {call.title: rank for rank, call in reversed(calls.items())}
    if len(titles) > 1:
        lines = ", ".join(f"rank {rank} called {title}" for title, rank in sorted(titles.items(), key=lambda x: x[1]))
        return f"Ranks call Horovod differently: {lines}. Make the same calls in the same order on every rank."
    for items in zip_longest(*(call.items for call in calls.values()), fillvalue="nothing"):
        passed = {item: rank for rank, item in reversed(list(zip(calls, items, strict=True)))}
        if len(passed) > 1:
            break
    lines = ", ".join(f"rank {rank} passed {item}" for item, rank in sorted(passed.items(), key=lambda x: x[1]))
    return f"{next(iter(titles))}: {lines}; pass the same on every rank."


class Compressor:
    """No compression, and the base class of compressors; pass a subclass as ``compression=MyCompressor``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the compressed tensor, of the same shape on all ranks, and a context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original dtype and shape."""
        return tensor


class _FP16Compressor(Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The available compressors: `none`, and `fp16`, which sends floating-point tensors as float16."""

    none = Compressor
    fp16 = _FP16Compressor


class Op(enum.IntEnum):
    """Reduce operations; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1


Average, Sum = Op


def as_op(op: int | None, average: bool | None = None) -> Op:
    """Return a call's operation; Average if neither is set.

    Args:
        op: Average or Sum.
        average: The older parameter: True is Average, False is Sum.

    Raises:
        UsageError: Both were passed, or `op` is neither.
    """
    if op is not None and average is not None:
        raise UsageError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn("Parameter `average` has been replaced with `op`.", DeprecationWarning, stacklevel=3)
        return Op.AVERAGE if average else Op.SUM
    if op not in (None, *Op):
        raise UsageError(f"op must be hvd.Average or hvd.Sum; got {op!r}.")
    return Op(op or 0)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; every rank gets the result. Differentiable.

    Args:
        tensor: Tensor of the same dtype and shape on all ranks; it is not changed.
        average: The older form of `op`.
        name: Name for messages; it must be the same on all ranks.
        compression: Compression of the tensor for communication.
        op: Average (default) or Sum. The average of integers is truncated.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        HorovodInternalError: Ranks pass different tensors, operations or names.
    """
    reduce_op = as_op(op, average)
    packed, context = compression.compress(_checked(tensor, "allreduce"))
    result = _Allreduce.apply(packed, name, reduce_op)  # type: ignore[no-untyped-call]
    unpacked: torch.Tensor = compression.decompress(result, context)
    return unpacked


class _Allreduce(torch.autograd.Function):
    """A reduction whose gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, op: Op) -> torch.Tensor:
        """Reduce a copy."""
        ctx.op = op
        if op is Op.AVERAGE and tensor.dtype is torch.bool:
            raise UsageError("hvd.allreduce of torch.bool: cannot average booleans; use op=hvd.Sum or tensor.float().")
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        reduce_buffers("allreduce", name, (f"{op.name.title()} of {describe(tensor)}",), [result.view(-1)], op)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Reduce the gradient."""
        return _Allreduce.apply(gradients[0], None, ctx.op), None, None  # type: ignore[no-untyped-call]


def reduce_buffers(
    kind: str, name: str | None, items: tuple[str, ...], buffers: Sequence[torch.Tensor], op: Op
) -> None:
    """Reduce contiguous 1-D tensors over all ranks, in place; `items` says what ranks must pass alike."""
    sizes = tuple((buffer.numel(), buffer.dtype, buffer.device.type) for buffer in buffers)
    agree(Call(kind, name, items, sizes))
    sum_buffers(buffers)
    for buffer in buffers if op is Op.AVERAGE else ():
        mode = None if buffer.is_floating_point() or buffer.is_complex() else "trunc"
        buffer.copy_(torch.div(buffer, len(current().hosts), rounding_mode=mode))


def _checked(tensor: Any, kind: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"hvd.{kind} needs a torch.Tensor, such as torch.tensor(value); got {type(tensor).__name__}.")
    if tensor.layout is not torch.strided:
        raise UsageError(f"hvd.{kind} does not support layout {tensor.layout}: pass tensor.to_dense().")
    if kind != "allreduce" and tensor.requires_grad and torch.is_grad_enabled():
        raise NotOfferedError(f"hvd.{kind} has no gradient here: pass tensor.detach(), or use torch.distributed.nn.")
    if kind in ("allgather", "alltoall") and not tensor.ndim:
        raise UsageError(f"hvd.{kind} needs at least one dimension: use tensor.reshape(1).")
    return tensor.contiguous()


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dim 0, in rank order, on every rank. Not differentiable.

    Args:
        tensor: Tensor of the same dtype and shape on all ranks, except for the size of dim 0.
        name: Name for messages; it must be the same on all ranks.

    Raises:
        NotOfferedError: The tensor requires a gradient.
        HorovodInternalError: Ranks pass different dtypes, shapes or names.
    """
    rows = _checked(tensor, "allgather")
    agree(Call("allgather", name, (describe(rows, any_rows=True),)))
    return comm.all_gather(rows, uneven=True)  # type: ignore[no-any-return]


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Any:
    """Send a part of a tensor's rows to each rank. Not differentiable.

    Args:
        tensor: Tensor of the same dtype and shape on all ranks, except for the size of dim 0.
        splits: Number of rows for each rank, a list or a tensor of integers; None divides the rows equally.
        name: Name for messages; it must be the same on all ranks.

    Returns:
        The received rows, in rank order; with `splits` also how many came from each rank.

    Raises:
        NotOfferedError: The tensor requires a gradient.
        UsageError: The rows cannot be divided, or the splits do not add up.
        HorovodInternalError: Ranks pass different dtypes, shapes or names.
    """
    rows = _checked(tensor, "alltoall")
    state = current()
    size, count = len(state.hosts), rows.shape[0]
    if splits is None and count % size:
        raise UsageError(f"hvd.alltoall of {count} rows without splits: rows must be divisible by {size} ranks.")
    counts = [count // size] * size if splits is None else torch.as_tensor(splits).tolist()
    if len(counts) != size or sum(counts) != count or any(type(each) is not int or each < 0 for each in counts):
        raise UsageError(
            f"hvd.alltoall: splits must be {size} integers, one for each rank, of sum {count}; got {counts}."
        )
    agree(Call("alltoall", name, (describe(rows, any_rows=True),)))
    received = comm.all_gather(torch.tensor([counts], device=rows.device))[:, state.rank].cpu()
    result = comm.all_to_all(rows, send_sizes=counts, recv_sizes=received.tolist())
    return result if splits is None else (result, received)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return rank `root_rank`'s tensor on every rank. Not differentiable.

    Args:
        tensor: Tensor of the same dtype and shape on all ranks; it is not changed.
        root_rank: Rank of the source.
        name: Name for messages; it must be the same on all ranks.

    Raises:
        NotOfferedError: The tensor requires a gradient.
        HorovodInternalError: Ranks pass different tensors, roots or names.
    """
    root = check_root(root_rank)
    result = _checked(tensor, "broadcast").clone()
    agree(Call("broadcast", name, (f"{describe(result)} with root rank {root}",)))
    return comm.broadcast(result, src=root)  # type: ignore[no-any-return]


def check_root(root_rank: int) -> int:
    """Return the rank.

    Raises:
        UsageError: There is no such rank.
    """
    size = len(current().hosts)
    if not 0 <= root_rank < size:
        raise UsageError(f"root_rank={root_rank}: must be from 0 to {size - 1}.")
    return root_rank
