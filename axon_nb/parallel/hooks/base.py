"""Base of DDP communication hooks: counts the bytes sent and optionally measures the compression error."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from axon_nb.comm.group import resolve
from axon_nb.comm.spans import now, record


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
