"""Compress gradient matrices to products of two thin ones: torch's PowerSGD.

Vogels, Karimireddy, Jaggi: PowerSGD (2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from axon_nb.errors import UsageError
from axon_nb.parallel.hooks.base import CommHook

__all__ = ["PowerSGD"]


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
