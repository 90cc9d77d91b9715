"""Synchronised BatchNorm under Horovod's name."""

from __future__ import annotations

import torch

from axon_nb.compat.horovod.runtime.state import current
from axon_nb.parallel import SyncBatchNorm as _SyncBatchNorm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_SyncBatchNorm):
    """Applies synchronous version of N-dimensional BatchNorm: `axon_nb.parallel.SyncBatchNorm` over all ranks.

    Works on CPUs too, unlike Horovod's.

    Args:
        num_features: Number of channels.
        eps: Added to the variance.
        momentum: Weight of the newest batch in the running statistics; None: their plain average.
        affine: Whether there are a weight and a bias.
        track_running_stats: Whether there are running statistics, which `eval()` uses.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise a tensor of shape (samples, channels, …).

        Raises:
            NotInitializedError: `hvd.init()` was not called.
        """
        current()
        return super().forward(input)
