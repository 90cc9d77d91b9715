"""Fast path of collectives: for tensors that need no conversion, with little Python between the call and the wire.

Such a tensor is a plain torch.Tensor: dense, on the CPU, without gradient, and of a dtype that Gloo supports. Its
group uses Gloo, and no torch mode is active. All checks and options for it are prepared in advance. Everything else,
including every error, takes the general path: the functions here then return None before anything is sent.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.overrides import has_torch_function

from axon_nb.comm.calls import report_payload
from axon_nb.comm.collectives import direct
from axon_nb.comm.collectives.agreement import is_checking
from axon_nb.comm.collectives.arrays import NATIVE
from axon_nb.comm.group import ProcessGroup, resolve
from axon_nb.comm.spans import now
from axon_nb.comm.types import Backend, ReduceOp
from axon_nb.records.spans import emit, span_of

_Tensor, _STRIDED, _AVERAGE, _CPU = torch.Tensor, torch.strided, ReduceOp.AVERAGE, torch.device("cpu")
_is_compiling, _World = torch.compiler.is_compiling, direct.TorchWorld
_fast_paths: dict[int, _FastPath] = {}
"""By the id of torch's group, while it lives: a WeakKeyDictionary takes ten times as long."""


class _FastPath:
    """Cached properties of a group for the fast path. Does not keep the group alive."""

    __slots__ = ("calls_backend", "gather", "global_rank", "group", "name", "records_spans", "scatter", "size")

    def __init__(self, group: ProcessGroup) -> None:
        torch_group, info = group.torch_group, group.info
        self.group: Any = weakref.ref(torch_group, functools.partial(_fast_paths.pop, id(torch_group)))
        self.size, self.name, self.global_rank = len(info.ranks), info.name, info.ranks[info.rank]
        self.records_spans = not info.emits_spans
        self.calls_backend = direct.is_torch_group(torch_group)
        """Whether to call the backend directly: torch's dispatcher would do nothing more for such a tensor."""
        self.gather: str = direct.BACKEND_METHODS[0] if self.calls_backend else direct.GATHER_METHOD
        self.scatter: str = direct.BACKEND_METHODS[1] if self.calls_backend else direct.SCATTER_METHOD

    def backend(self) -> Any:
        """Return the object to call; looked up for each call, as a rebuild can replace it."""
        return self.group()._get_backend(_CPU) if self.calls_backend else self.group()

    def record(self, name: str, start_ns: int, size: int) -> None:
        """Record the span of a finished call."""
        if self.records_spans:
            emit(span_of((self.global_rank, "collective", name, start_ns, now(), self.name, size, -1, -1, 0, 0)))
            report_payload(self.global_rank, name, size, self.size)


def _fast_path(tensor: Any, group: Any) -> _FastPath | None:
    """Return the fast path of the group if this tensor can use it now, else None."""
    if (
        direct.HOOKS_MISSING
        or type(tensor) is not _Tensor
        or not tensor.is_cpu
        or tensor.dtype not in NATIVE
        or tensor.requires_grad
        or tensor.layout is not _STRIDED
        or not tensor.is_contiguous()
        or is_checking()
        or direct.num_dispatch_modes()
        or has_torch_function((tensor,))
        or _is_compiling()
    ):
        return None
    world: Any = c10d._world
    if type(world) is not _World or world._pg_coalesce_state:
        return None  # a mock world, or calls are being coalesced
    torch_group = world._default_pg if group is None else group._torch if type(group) is ProcessGroup else group
    return _fast_paths.get(id(torch_group)) or _open(group)


def _open(group: Any) -> _FastPath | None:
    resolved = resolve(group)
    if resolved.backend is not Backend.GLOO or not resolved.is_member:
        return None
    return _fast_paths.setdefault(id(resolved.torch_group), _FastPath(resolved))


@functools.cache
def _all_reduce_options(op: ReduceOp) -> Any:
    return direct.shared_options("AllreduceOptions", False, reduceOp=op.torch_op)


@functools.cache
def _reduce_scatter_options(op: ReduceOp) -> Any:
    return direct.shared_options("ReduceScatterOptions", False, reduceOp=op.torch_op)


@functools.cache
def _broadcast_options(root: int) -> Any:
    return direct.shared_options("BroadcastOptions", False, rootRank=root, rootTensor=0)


@functools.cache
def _all_gather_options() -> Any:
    return direct.shared_options("AllgatherOptions", False)


def _supports_op(tensor: torch.Tensor, op: Any) -> bool:
    return type(op) is ReduceOp and (op is not _AVERAGE or tensor.is_floating_point())


def all_reduce(tensor: Any, op: Any, group: Any) -> Any:
    """Combine `tensor` over ranks in place; None means: take the general path."""
    if (path := _fast_path(tensor, group)) is None or not _supports_op(tensor, op):
        return None
    start: int = now()
    work = path.backend().allreduce([tensor], _all_reduce_options(op))
    size = tensor.nbytes  # computed while the call is in progress
    if work is not None:  # else the group has already waited
        work.wait()
    if op is _AVERAGE and path.size > 1:
        tensor.div_(path.size)
    path.record("all_reduce", start, size)
    return tensor


def broadcast(tensor: Any, src: Any, group: Any) -> Any:
    """Copy rank `src`'s `tensor` to all ranks in place; None means: take the general path."""
    if (path := _fast_path(tensor, group)) is None or type(src) is not int or not 0 <= src < path.size:
        return None
    start: int = now()
    work = path.backend().broadcast([tensor], _broadcast_options(src))
    size = tensor.nbytes
    if work is not None:
        work.wait()
    path.record("broadcast", start, size)
    return tensor


def all_gather(tensor: Any, group: Any) -> Any:
    """Join the tensors of all ranks along dim 0; None means: take the general path."""
    if (path := _fast_path(tensor, group)) is None or not tensor.ndim:
        return None
    rows, *rest = tensor.shape
    start: int = now()
    whole = tensor.new_empty(rows * path.size, *rest)
    work = getattr(path.backend(), path.gather)(whole, tensor, _all_gather_options())
    size = tensor.nbytes
    if work is not None:
        work.wait()
    path.record("all_gather", start, size)
    return whole


def reduce_scatter(tensor: Any, op: Any, group: Any) -> Any:
    """Return this rank's rows of the combined tensor; None means: take the general path."""
    if (path := _fast_path(tensor, group)) is None or not tensor.ndim or not _supports_op(tensor, op):
        return None
    rows, *rest = tensor.shape
    if rows % path.size:
        return None
    start: int = now()
    part = tensor.new_empty(rows // path.size, *rest)
    work = getattr(path.backend(), path.scatter)(part, tensor, _reduce_scatter_options(op))
    size = tensor.nbytes
    if work is not None:
        work.wait()
    if op is _AVERAGE:
        part.div_(path.size)
    path.record("reduce_scatter", start, size)
    return part
