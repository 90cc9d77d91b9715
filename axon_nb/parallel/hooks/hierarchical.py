"""Average in two levels, first within a node, then across nodes, so that slow links carry only a fraction."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh

from axon_nb.comm.torch_names import all_gather_single, reduce_scatter_single
from axon_nb.errors import UsageError
from axon_nb.parallel.hooks.base import CommHook, completed_future

__all__ = ["Hierarchical"]


class Hierarchical(CommHook):
    """Reduce-scatter within the node, all_reduce across nodes, all_gather within the node.

    Each rank sends 1 / (ranks per node) of the bucket across nodes. Exact, up to rounding.

    Args:
        mesh: A 2-D mesh of (node, local) ranks: `init_device_mesh("cpu", (nodes, local), mesh_dim_names=…)`.
        measure: See `CommHook`.

    Raises:
        UsageError: the mesh does not have 2 dimensions.
    """

    def __init__(self, mesh: DeviceMesh, *, measure: bool = False) -> None:
        super().__init__(measure=measure)
        if mesh.ndim != 2:
            raise UsageError(f"Hierarchical needs a mesh of 2 dimensions, (node, local); got {mesh.ndim}.")
        self._across: Any = mesh.get_group(0)
        self._within: Any = mesh.get_group(1)
        self.bytes_across_nodes = 0
        """Payload that this rank passed to collectives across nodes, in bytes."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket; synchronous."""
        buffer, local = bucket.buffer(), self._within.size()
        padding = -buffer.numel() % local
        whole = torch.cat([buffer, buffer.new_zeros(padding)]) if padding else buffer
        part = whole.new_empty(whole.numel() // local)
        reduce_scatter_single(part, whole, group=self._within)
        dist.all_reduce(part, group=self._across)
        part.div_(local * self._across.size())
        all_gather_single(whole, part, group=self._within)
        self.stats.bytes_sent += whole.nbytes + 2 * part.nbytes
        self.bytes_across_nodes += part.nbytes
        if padding:
            buffer.copy_(whole[: buffer.numel()])
        return completed_future(buffer)
