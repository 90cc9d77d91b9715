"""Collectives straight on torch's groups: `dist.all_reduce` and its like take some 5 us a call for checks and set-up.

What they check is known here already. Where they do more than that (in a coalescing block, under `torch.compile`, with
subclasses and modes of tensors, on a torch whose groups lack the methods) torch's own functions are called.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d
from torch.overrides import has_torch_function

from axon_nb.comm.torch_names import all_gather_single, reduce_scatter_single
from axon_nb.torch_api import torch_api

__all__ = [
    "BACKENDS",
    "GATHER",
    "IS_MISSING",
    "SCATTER",
    "TorchWorld",
    "all_gather",
    "all_reduce",
    "broadcast",
    "is_native",
    "is_plain",
    "missing_direct_hooks",
    "num_modes",
    "options_of",
    "reduce_scatter",
]


GATHER = torch_api().gather_method
"""The method of torch's groups that gathers into one tensor."""
SCATTER = torch_api().scatter_method
"""The method of torch's groups that reduces one tensor and scatters it."""
BACKENDS = ("_allgather_base", "_reduce_scatter_base")
"""What backends call the two."""
TorchWorld: Any = getattr(c10d, "_World", None)
"""The class of what torch keeps its groups in."""
num_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None) or (lambda: 1)
"""How many modes look on at what is dispatched; where that is not known: one."""


def missing_direct_hooks() -> list[str]:
    """Names of what is used here that this torch does not have."""
    methods = (GATHER, "allreduce", "broadcast", SCATTER)
    wanted = {f"ProcessGroup.{name}": hasattr(dist.ProcessGroup, name) for name in methods}
    wanted["_world.pg_coalesce_state"] = getattr(getattr(c10d, "_world", None), "pg_coalesce_state", None) is not None
    world = getattr(c10d, "_world", None)
    if type(world) is TorchWorld:  # else within a mock world
        wanted |= {f"_world.{name}": hasattr(world, name) for name in ("_default_pg", "_pg_coalesce_state")}
    options = ("AllgatherOptions", "AllreduceOptions", "BroadcastOptions", "ReduceScatterOptions")
    gone = [name for name, there in wanted.items() if not there]
    return gone + [name for name in options if not hasattr(c10d, name)]


IS_MISSING = bool(missing_direct_hooks())
"""Whether any of it is: then all is left to torch's public functions."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the public function would do nothing more than to call the group."""
    if IS_MISSING or has_torch_function((tensor,)) or torch.compiler.is_compiling():
        return False
    return not c10d._world.pg_coalesce_state


def is_native(group: Any) -> bool:
    """Whether it is torch's own group, whose backend can be called."""
    names = ("allreduce", "broadcast", *BACKENDS)
    backend = getattr(_distributed_c10d, "Backend", None)
    return type(group) is dist.ProcessGroup and all(hasattr(backend, name) for name in names)


@functools.cache
def options_of(kind: str, async_op: bool, /, **values: Any) -> Any:
    """Options of one kind: read by the groups, never changed, and so shared by all calls."""
    options: Any = getattr(c10d, kind)()
    for name, value in values.items():
        setattr(options, name, value)
    options.asyncOp = async_op
    return options


def _waited(work: Any, async_op: bool) -> Any:
    if async_op:
        return work
    if work is not None:  # else the backend has waited itself
        work.wait()
    return None


def all_reduce(tensor: torch.Tensor, op: Any, *, group: Any, async_op: bool) -> Any:
    """As torch's: the work when `async_op`, else None, when the result is there."""
    if not is_plain(tensor) or tensor.is_complex():
        return dist.all_reduce(tensor, op, group=group, async_op=async_op)
    return _waited(group.allreduce([tensor], options_of("AllreduceOptions", async_op, reduceOp=op)), async_op)


def broadcast(tensor: torch.Tensor, root: int, *, group: Any, async_op: bool) -> Any:
    """As torch's, but `root` is a rank of the group."""
    if not is_plain(tensor) or tensor.is_complex():
        return dist.broadcast(tensor, group=group, async_op=async_op, group_src=root)
    options = options_of("BroadcastOptions", async_op, rootRank=root, rootTensor=0)
    return _waited(group.broadcast([tensor], options), async_op)


def all_gather(out: torch.Tensor, tensor: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    """As torch's `all_gather_single`."""
    if not is_plain(tensor) or tensor.is_complex():
        return all_gather_single(out, tensor, group=group, async_op=async_op)
    return _waited(getattr(group, GATHER)(out, tensor, options_of("AllgatherOptions", async_op)), async_op)


def reduce_scatter(out: torch.Tensor, tensor: torch.Tensor, op: Any, *, group: Any, async_op: bool) -> Any:
    """As torch's `reduce_scatter_single`."""
    if not is_plain(tensor) or tensor.is_complex():
        return reduce_scatter_single(out, tensor, op=op, group=group, async_op=async_op)
    options = options_of("ReduceScatterOptions", async_op, reduceOp=op)
    return _waited(getattr(group, SCATTER)(out, tensor, options), async_op)
