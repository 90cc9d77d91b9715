"""Communication hooks that send fewer bytes: half precision, two levels, PowerSGD, and the largest gradients only.

References: Vogels, Karimireddy, Jaggi: PowerSGD (2019). Stich, Cordonnier, Jaggi: Sparsified SGD with Memory (2018),
for the error feedback of `TopK`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh

from axon_nb.comm.collectives.direct import all_gather_single, reduce_scatter_single
from axon_nb.errors import UsageError
from axon_nb.parallel.hooks.base import CommHook, completed_future


class _Cast(CommHook):
    dtype: torch.dtype

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket in half precision."""
        buffer = bucket.buffer()

        def widen(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            buffer.copy_(future.value())
            return buffer

        return self.all_reduce_mean(buffer.to(self.dtype)).then(widen)


class FP16(_Cast):
    """float16: 11 significant bits, maximum 65504."""

    dtype = torch.float16


class BF16(_Cast):
    """bfloat16: 8 significant bits, the range of float32. Works on Gloo, which torch's own hook does not support."""

    dtype = torch.bfloat16


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


class PowerSGD(CommHook):
    """torch's PowerSGD hook, with its bytes counted.

    Args:
        rank: Columns of the thin matrices; more are more accurate and larger.
        start_step: Number of initial steps with plain averaging, at least 2: gradients of a new model compress poorly,
            and DDP rebuilds its buckets after the first step.
        min_compression: Matrices that would shrink by less than this factor are sent uncompressed.
        measure: See `CommHook`.

    Raises:
        UsageError: `rank` is below 1 or `start_step` is below 2.
    """

    needs_single_bucket = True  # chains of collectives of several buckets would interfere

    def __init__(
        self, rank: int = 2, *, start_step: int = 2, min_compression: float = 2.0, measure: bool = False
    ) -> None:
        super().__init__(measure=measure)
        if rank < 1 or start_step < 2:
            raise UsageError(f"PowerSGD needs rank >= 1 and start_step >= 2; got rank={rank}, start_step={start_step}.")
        self.rank = rank
        self.start_step = start_step
        self.min_compression = min_compression
        self._state: Any = None

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket."""
        if self._state is None:
            self._state = PowerSGDState(
                process_group=self.group,
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=self.start_step,
                min_compression_rate=self.min_compression,
                compression_stats_logging_frequency=10**9,
            )
        state, buffer = self._state, bucket.buffer()
        before = state.total_numel_after_compression
        plain = state.iter < state.start_powerSGD_iter
        future: torch.futures.Future[torch.Tensor] = powerSGD_hook(state, bucket)
        sent = buffer.numel() if plain else state.total_numel_after_compression - before
        self.stats.bytes_sent += int(sent) * buffer.element_size()
        return future


class TopK(CommHook):
    """Sends the largest elements of each bucket by absolute value, as (index, value) pairs.

    Args:
        ratio: Fraction of the elements to send, above 0 and at most 1; at least one per bucket is sent.
        error_feedback: Add unsent elements to the next step's gradient; without it much information is lost.
        measure: See `CommHook`.

    Raises:
        UsageError: `ratio` is out of range.
    """

    def __init__(self, ratio: float = 0.01, *, error_feedback: bool = True, measure: bool = False) -> None:
        super().__init__(measure=measure)
        if not 0 < ratio <= 1:
            raise UsageError(f"ratio must be above 0 and at most 1, the fraction of elements to send; got {ratio}.")
        self.ratio = ratio
        self.error_feedback = error_feedback
        # By parameter, not by bucket: DDP rebuilds its buckets after the first step.
        self._residuals: dict[int, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without residuals: they belong to this process and its parameters."""
        return vars(self) | {"_residuals": {}}

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket; synchronous, as all pairs are needed before they are added."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if self.error_feedback:
            for gradient, parameter in zip(bucket.gradients(), parameters, strict=True):
                if (residual := self._residuals.get(id(parameter))) is not None:
                    gradient.add_(residual.view_as(gradient))
        count = max(1, int(buffer.numel() * self.ratio))
        indices = buffer.abs().topk(count, sorted=False).indices
        values = buffer[indices]
        if self.error_feedback:
            buffer[indices] = 0
            for gradient, parameter in zip(bucket.gradients(), parameters, strict=True):
                # An overflow is the largest element, so it is sent; kept as a residual it would spoil all later steps.
                self._residuals[id(parameter)] = gradient.nan_to_num(0.0, 0.0, 0.0)
        self._average(buffer, indices, values)
        return completed_future(buffer)

    def _average(self, buffer: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        narrow = indices.to(torch.int32) if buffer.numel() < 2**31 else indices
        all_indices = narrow.new_empty(self.num_ranks * narrow.numel())
        all_values = values.new_empty(self.num_ranks * values.numel())
        all_gather_single(all_indices, narrow, group=self.group)
        all_gather_single(all_values, values, group=self.group)
        self.stats.bytes_sent += narrow.nbytes + values.nbytes
        buffer.zero_()
        # Added in rank order: the sum is identical on all ranks, bit for bit.
        for index, value in zip(all_indices.chunk(self.num_ranks), all_values.chunk(self.num_ranks), strict=True):
            buffer[index.long()] += value
        buffer.div_(self.num_ranks)
