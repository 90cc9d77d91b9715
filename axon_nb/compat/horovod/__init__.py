"""Horovod's API for PyTorch on axon_nb's groups: ``from axon_nb.compat import horovod as hvd``.

Works in a `%%distributed` cell, under torchrun, mpirun or srun, and in a single plain process. It has what Horovod's
own examples use (version 0.28); any other name raises an error that names the torch call to use: `docs/horovod.md`.
"""

from __future__ import annotations

from typing import NoReturn

from axon_nb.compat.horovod.collectives import (
    Average,
    Compression,
    Compressor,
    HorovodInternalError,
    NotOfferedError,
    Sum,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from axon_nb.compat.horovod.optimizer import (
    DistributedOptimizer,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

_GROUP = "a group of torch.distributed.new_group(ranks), with torch.distributed's collectives"
_BACKEND = "torch.distributed.get_backend()"
# Collectives stand here without the prefix `grouped_` and the suffixes `_`, `_async` and `_async_`.
_INSTEAD = {
    "Adasum": "hvd.Average with the learning rate scaled by hvd.size()",
    **dict.fromkeys(
        ("Max", "Min", "Product"), "torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)"
    ),
    **dict.fromkeys(("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"), _GROUP),
    "SyncBatchNorm": "axon_nb.parallel.SyncBatchNorm",
    "allgather": "torch.distributed.all_gather(tensors, tensor, async_op=True)",
    "allgather_object": "torch.distributed.all_gather_object(objects, value)",
    "allreduce": "torch.distributed.all_reduce(tensor, async_op=True)",
    "alltoall": "torch.distributed.all_to_all_single(output, tensor, async_op=True)",
    "barrier": "torch.distributed.barrier()",
    "broadcast": "torch.distributed.broadcast(tensor, src, async_op=True)",
    **dict.fromkeys(("cross_rank", "cross_size", "is_homogeneous"), "hvd.rank(), hvd.size() and hvd.local_size()"),
    "elastic": "`%distributed repair` to replace a dead rank, or axon_nb.parallel.Checkpoints to resume on other ranks",
    **dict.fromkeys(
        ("poll", "synchronize"), "torch.distributed.all_reduce(tensor, async_op=True), and wait for its work"
    ),
    "reducescatter": "torch.distributed.reduce_scatter_tensor(output, tensor, async_op=True)",
    "sparse_allreduce": "torch.distributed.all_reduce(tensor.to_dense())",
    **dict.fromkeys([f"{name}_built" for name in ("ccl", "cuda", "ddl", "gloo", "mpi", "nccl", "rocm")], _BACKEND),
    **dict.fromkeys(("gloo_enabled", "mpi_enabled", "mpi_threads_supported"), _BACKEND),
    **dict.fromkeys(("start_timeline", "stop_timeline"), "`%timeline`, or torch.profiler.profile()"),
}


def __getattr__(name: str) -> NoReturn:
    collective = name.removeprefix("grouped_").removesuffix("_").removesuffix("_async")
    if (instead := _INSTEAD.get(name, _INSTEAD.get(collective))) and not name.startswith("_"):
        raise NotOfferedError(f"hvd.{name} is not offered here: use {instead}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
