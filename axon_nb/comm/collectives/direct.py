"""Collectives that call torch's groups directly: functions such as `dist.all_reduce` spend some 5 us on checks.

These checks have already been made here. Where the public functions do more than that (in a coalescing block, under
`torch.compile`, with tensor subclasses and modes, on a torch whose groups lack the methods), they are called instead.
Functions that torch.distributed has renamed have their current names here.

The fast path (`fast_all_reduce` and so on) is for tensors that need no conversion: a plain torch.Tensor, dense, on the
CPU, without gradient, and of a dtype that Gloo supports, in a group that uses Gloo, while no torch mode is active. All
checks and options for it are prepared in advance, so that little Python runs between the call and the wire. Everything
else, including every error, takes the general path: these functions then return None before anything is sent.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d
from torch.overrides import has_torch_function

from axon_nb.comm.calls import report_payload
from axon_nb.comm.collectives.arguments import NATIVE, is_checking
from axon_nb.comm.group import Backend, ProcessGroup, ReduceOp, resolve
from axon_nb.comm.spans import now
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.spans import emit, span_of
from axon_nb.torch_api import torch_api

all_gather_single: Any = torch_api().all_gather_single
reduce_scatter_single: Any = torch_api().reduce_scatter_single
GATHER_METHOD = torch_api().gather_method
"""Name of the group method that gathers into one tensor."""
SCATTER_METHOD = torch_api().scatter_method
"""Name of the group method that reduces one tensor and scatters the result."""
BACKEND_METHODS = ("_allgather_base", "_reduce_scatter_base")
"""Names of the same two methods on backends."""
TorchWorld: Any = getattr(c10d, "_World", None)
"""The class of the object in which torch keeps its groups."""
num_dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None) or (lambda: 1)
"""Number of active torch dispatch modes; one if torch does not say."""
_Tensor, _STRIDED, _AVERAGE, _CPU = torch.Tensor, torch.strided, ReduceOp.AVERAGE, torch.device("cpu")
_is_compiling, _World = torch.compiler.is_compiling, TorchWorld
_fast_paths: dict[int, _FastPath] = {}
"""By the id of torch's group, while it lives: a WeakKeyDictionary takes ten times as long."""


def call_problems() -> list[str]:
    """Return what direct calls need and this torch lacks: methods of its groups, and state of the live world."""
    wanted = {f"ProcessGroup.{name}": hasattr(dist.ProcessGroup, name) for name in (GATHER_METHOD, SCATTER_METHOD)}
    world: Any = c10d._world
    wanted["_world.pg_coalesce_state"] = getattr(world, "pg_coalesce_state", None) is not None
    if type(world) is TorchWorld:  # else inside a mock world
        wanted |= {f"_world.{name}": hasattr(world, name) for name in ("_default_pg", "_pg_coalesce_state")}
    return [name for name, there in wanted.items() if not there]


HOOKS_MISSING = bool(missing_hooks("comm.direct"))
"""Whether any of them is missing: then only torch's public functions are called."""


def can_call_directly(tensor: torch.Tensor) -> bool:
    """Whether the public function would do nothing but call the group."""
    if HOOKS_MISSING or has_torch_function((tensor,)) or torch.compiler.is_compiling():
        return False
    return not c10d._world.pg_coalesce_state


def is_torch_group(group: Any) -> bool:
    """Whether `group` is torch's own class, so that its backend can be called."""
    names = ("allreduce", "broadcast", *BACKEND_METHODS)
    backend = getattr(_distributed_c10d, "Backend", None)
    return type(group) is dist.ProcessGroup and all(hasattr(backend, name) for name in names)


@functools.cache
def shared_options(kind: str, async_op: bool, /, **values: Any) -> Any:
    """Return shared options of one kind. Groups only read them, so all calls can use the same object."""
    options: Any = getattr(c10d, kind)()
    for name, value in values.items():
        setattr(options, name, value)
    options.asyncOp = async_op
    return options


def _wait(work: Any, async_op: bool) -> Any:
    if async_op:
        return work
    if work is not None:  # else the backend has already waited
        work.wait()
    return None


def all_reduce(tensor: torch.Tensor, op: Any, *, group: Any, async_op: bool) -> Any:
    """Like `dist.all_reduce`: returns the work if `async_op`, else None once the result is there."""
    if not can_call_directly(tensor) or tensor.is_complex():
        return dist.all_reduce(tensor, op, group=group, async_op=async_op)
    return _wait(group.allreduce([tensor], shared_options("AllreduceOptions", async_op, reduceOp=op)), async_op)


def broadcast(tensor: torch.Tensor, root: int, *, group: Any, async_op: bool) -> Any:
    """Like `dist.broadcast`, but `root` is a rank within the group."""
    if not can_call_directly(tensor) or tensor.is_complex():
        return dist.broadcast(tensor, group=group, async_op=async_op, group_src=root)
    options = shared_options("BroadcastOptions", async_op, rootRank=root, rootTensor=0)
    return _wait(group.broadcast([tensor], options), async_op)


def all_gather(out: torch.Tensor, tensor: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    """Like torch's `all_gather_single`."""
    if not can_call_directly(tensor) or tensor.is_complex():
        return all_gather_single(out, tensor, group=group, async_op=async_op)
    return _wait(getattr(group, GATHER_METHOD)(out, tensor, shared_options("AllgatherOptions", async_op)), async_op)


def reduce_scatter(out: torch.Tensor, tensor: torch.Tensor, op: Any, *, group: Any, async_op: bool) -> Any:
    """Like torch's `reduce_scatter_single`."""
    if not can_call_directly(tensor) or tensor.is_complex():
        return reduce_scatter_single(out, tensor, op=op, group=group, async_op=async_op)
    options = shared_options("ReduceScatterOptions", async_op, reduceOp=op)
    return _wait(getattr(group, SCATTER_METHOD)(out, tensor, options), async_op)


class _FastPath:
    """Cached properties of a group for the fast path. Does not keep the group alive."""

    __slots__ = ("calls_backend", "gather", "global_rank", "group", "name", "records_spans", "scatter", "size")

    def __init__(self, group: ProcessGroup) -> None:
        torch_group, info = group.torch_group, group.info
        self.group: Any = weakref.ref(torch_group, functools.partial(_fast_paths.pop, id(torch_group)))
        self.size, self.name, self.global_rank = len(info.ranks), info.name, info.ranks[info.rank]
        self.records_spans = not info.emits_spans
        self.calls_backend = is_torch_group(torch_group)
        """Whether to call the backend directly: torch's dispatcher would do nothing more for such a tensor."""
        self.gather: str = BACKEND_METHODS[0] if self.calls_backend else GATHER_METHOD
        self.scatter: str = BACKEND_METHODS[1] if self.calls_backend else SCATTER_METHOD

    def backend(self) -> Any:
        """Return the object to call; looked up for each call, as a rebuild can replace it."""
        return self.group()._get_backend(_CPU) if self.calls_backend else self.group()

    def record(self, name: str, start_ns: int, size: int) -> None:
        """Record the span of a finished call."""
        if self.records_spans:
            whole = size * self.size if name == "all_gather" else size
            emit(span_of((self.global_rank, "collective", name, start_ns, now(), self.name, whole, -1, -1, 0, 0)))
            report_payload(self.global_rank, name, size, self.size, None if self.calls_backend else self.group())


def _fast_path(tensor: Any, group: Any) -> _FastPath | None:
    """Return the fast path of the group if this tensor can use it now, else None."""
    if (
        HOOKS_MISSING
        or type(tensor) is not _Tensor
        or not tensor.is_cpu
        or tensor.dtype not in NATIVE
        or tensor.requires_grad
        or tensor.layout is not _STRIDED
        or not tensor.is_contiguous()
        or is_checking()
        or num_dispatch_modes()
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
    return shared_options("AllreduceOptions", False, reduceOp=op.torch_op)


@functools.cache
def _reduce_scatter_options(op: ReduceOp) -> Any:
    return shared_options("ReduceScatterOptions", False, reduceOp=op.torch_op)


@functools.cache
def _broadcast_options(root: int) -> Any:
    return shared_options("BroadcastOptions", False, rootRank=root, rootTensor=0)


@functools.cache
def _all_gather_options() -> Any:
    return shared_options("AllgatherOptions", False)


def _supports_op(tensor: torch.Tensor, op: Any) -> bool:
    return type(op) is ReduceOp and (op is not _AVERAGE or tensor.is_floating_point())


def fast_all_reduce(tensor: Any, op: Any, group: Any) -> Any:
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


def fast_broadcast(tensor: Any, src: Any, group: Any) -> Any:
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


def fast_all_gather(tensor: Any, group: Any) -> Any:
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


def fast_reduce_scatter(tensor: Any, op: Any, group: Any) -> Any:
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
