"""Send gradients in half precision: half the bytes of float32."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import GradBucket

from axon_nb.parallel.hooks.base import CommHook

__all__ = ["BF16", "FP16"]


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
