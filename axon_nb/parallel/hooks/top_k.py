"""Only the largest gradients travel; what stays behind is added to the next step's.

Error feedback as in Stich, Cordonnier, Jaggi: Sparsified SGD with Memory (2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from axon_nb.comm.errors import CommError
from axon_nb.comm.torch_names import all_gather_single
from axon_nb.parallel.hooks.base import CommHook, finished

__all__ = ["TopK"]


class TopK(CommHook):
    """Sends the largest share of each bucket by absolute value, as (index, value) pairs.

    Args:
        ratio: Share of the elements that travel, above 0 and at most 1; at least one of each bucket does.
        error_feedback: Keep what did not travel and add it to the next step's gradient; without it much is lost.
        measure: See `CommHook`.

    Raises:
        CommError: a ratio that is no share.
    """

    def __init__(self, ratio: float = 0.01, *, error_feedback: bool = True, measure: bool = False) -> None:
        super().__init__(measure=measure)
        if not 0 < ratio <= 1:
            raise CommError(f"ratio {ratio}: it is the share of elements that travel, above 0 and at most 1.")
        self.ratio = ratio
        self.error_feedback = error_feedback
        # By parameter, not by bucket: DDP cuts its buckets anew after the first step.
        self._left: dict[int, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What stayed behind stays with this process and its parameters: a copy begins with nothing."""
        return vars(self) | {"_left": {}}

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket; synchronous, as pairs must be joined before they are added."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if self.error_feedback:
            for gradient, parameter in zip(bucket.gradients(), parameters, strict=True):
                if (left := self._left.get(id(parameter))) is not None:
                    gradient.add_(left.view_as(gradient))
        count = max(1, int(buffer.numel() * self.ratio))
        indices = buffer.abs().topk(count, sorted=False).indices
        values = buffer[indices]
        if self.error_feedback:
            buffer[indices] = 0
            for gradient, parameter in zip(bucket.gradients(), parameters, strict=True):
                # An overflow travels, for it is the largest there is; kept, it would spoil all later steps as well.
                self._left[id(parameter)] = gradient.nan_to_num(0.0, 0.0, 0.0)
        self._average(buffer, indices, values)
        return finished(buffer)

    def _average(self, buffer: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        narrow = indices.to(torch.int32) if buffer.numel() < 2**31 else indices
        all_indices = narrow.new_empty(self.num_ranks * narrow.numel())
        all_values = values.new_empty(self.num_ranks * values.numel())
        all_gather_single(all_indices, narrow, group=self.group)
        all_gather_single(all_values, values, group=self.group)
        self.stats.bytes_sent += narrow.nbytes + values.nbytes
        buffer.zero_()
        # One rank after the other: the sum is the same on all of them, bit for bit.
        for place, value in zip(all_indices.chunk(self.num_ranks), all_values.chunk(self.num_ranks), strict=True):
            buffer[place.long()] += value
        buffer.div_(self.num_ranks)
