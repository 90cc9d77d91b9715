"""Gradient matrices as products of two thin ones: torch's PowerSGD.

Vogels, Karimireddy, Jaggi: PowerSGD (2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from axon_nb.comm.errors import CommError
from axon_nb.parallel.hooks.base import CommHook

__all__ = ["PowerSGD"]


class PowerSGD(CommHook):
    """torch's hook, with its bytes counted.

    Args:
        rank: Columns of the thin matrices; more is closer and larger.
        start_step: Steps of plain averaging first, at least 2: gradients of a fresh model do not compress well, and
            DDP cuts its buckets anew after the first.
        min_compression: Matrices that would shrink by less than this factor travel as they are.
        measure: See `CommHook`.

    Raises:
        CommError: rank is below 1, start_step below 2.
    """

    one_bucket = True  # with several, their chains of collectives get in each other's way

    def __init__(
        self, rank: int = 2, *, start_step: int = 2, min_compression: float = 2.0, measure: bool = False
    ) -> None:
        super().__init__(measure=measure)
        if rank < 1 or start_step < 2:
            raise CommError(f"PowerSGD with rank {rank} and start_step {start_step}: at least 1 and 2.")
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
