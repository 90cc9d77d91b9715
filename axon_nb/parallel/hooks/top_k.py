"""Send only the largest gradients; the rest is added to the next step's gradients.

Error feedback as in Stich, Cordonnier, Jaggi: Sparsified SGD with Memory (2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from axon_nb.comm.torch_names import all_gather_single
from axon_nb.errors import UsageError
from axon_nb.parallel.hooks.base import CommHook, completed_future

__all__ = ["TopK"]


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
