"""Collectives that call torch's groups directly: functions such as `dist.all_reduce` spend some 5 us on checks.

These checks have already been made here. Where the public functions do more than that (in a coalescing block, under
`torch.compile`, with tensor subclasses and modes, on a torch whose groups lack the methods), they are called instead.
Functions that torch.distributed has renamed have their current names here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d
from torch.overrides import has_torch_function

from axon_nb.records.hooks import missing_hooks
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
