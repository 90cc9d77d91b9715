"""DDP communication hooks that replace the plain all_reduce: compression and hierarchical averaging.

The base counts the bytes sent and optionally measures the compression error. Hooks send fewer bytes: half precision,
two levels, PowerSGD, and the largest gradients only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh

from axon_nb.comm.collectives.direct import all_gather_single, reduce_scatter_single
from axon_nb.comm.group import resolve
from axon_nb.comm.spans import now, record
from axon_nb.errors import UsageError


@dataclass
class HookStats:
    """Totals over all buckets and steps since the hook was registered, on this rank."""

    bytes_sent: int = 0
    """Payload that this rank passed to collectives, in bytes."""
    bytes_uncompressed: int = 0
    """Payload of a plain all_reduce of the same gradients, in bytes."""
    buckets: int = 0
    """Number of buckets reduced."""
    _error: float = field(default=0.0, repr=False)
    _exact: float = field(default=0.0, repr=False)

    @property
    def ratio(self) -> float:
        """Bytes sent / bytes uncompressed; 0 before the first bucket."""
        return self.bytes_sent / self.bytes_uncompressed if self.bytes_uncompressed else 0.0

    @property
    def error(self) -> float:
        """Relative error of the averages, |compressed - exact| / |exact| in the 2-norm; NaN if not measured."""
        return math.sqrt(self._error / self._exact) if self._exact else math.nan

    def compare(self, compressed: torch.Tensor, exact: torch.Tensor) -> None:
        """Add one bucket to the error."""
        self._error += float((compressed.double() - exact.double()).square().sum())
        self._exact += float(exact.double().square().sum())


class CommHook:
    """Base class of hooks for `DDP.register_hook`.

    Args:
        measure: Also average every bucket exactly, and add the difference to `stats.error`. This costs as much as the
            hook saves.
    """

    needs_single_bucket = False
    """Whether all gradients must be in one bucket."""

    def __init__(self, *, measure: bool = False) -> None:
        self.measure = measure
        self.stats = HookStats()
        self.group: Any = None
        """torch's group; set by `DDP.register_hook`."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that average."""
        return int(self.group.size())

    def __repr__(self) -> str:
        stats = self.stats
        return f"{type(self).__name__}(sent {stats.bytes_sent:,} of {stats.bytes_uncompressed:,} bytes)"

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging one bucket; the future returns the averaged buffer."""
        raise NotImplementedError

    def call(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Process a bucket; called by DDP. Records one span, unless the group itself records its calls."""
        start, before = now(), self.stats.bytes_sent
        started = self._reduce_counted(bucket)
        sent = self.stats.bytes_sent - before

        def recorded(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            record(resolve(self.group), type(self).__name__, start, sent)
            return future.value()

        return started.then(recorded)

    def _reduce_counted(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self.stats.buckets += 1
        self.stats.bytes_uncompressed += buffer.nbytes
        if not self.measure:
            return self.reduce(bucket)
        exact = buffer.clone()
        dist.all_reduce(exact, group=self.group)
        exact.div_(self.num_ranks)

        def compare(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            result = future.value()
            self.stats.compare(result, exact)
            return result

        return self.reduce(bucket).then(compare)

    def all_reduce_mean(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a tensor created by the hook, and count its bytes."""
        # Divided first, so that half precision does not overflow.
        self.stats.bytes_sent += tensor.nbytes
        work = dist.all_reduce(tensor.div_(self.num_ranks), group=self.group, async_op=True)
        assert work is not None
        future: Any = work.get_future()
        return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def completed_future(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future with this value."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


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
