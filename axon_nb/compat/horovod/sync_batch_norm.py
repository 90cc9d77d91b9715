"""BatchNorm with the statistics of all ranks' samples, by Horovod's name."""

from __future__ import annotations

import torch

from axon_nb.compat.horovod.state import current
from axon_nb.parallel import SyncBatchNorm as _SyncBatchNorm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_SyncBatchNorm):
    """Applies synchronous version of N-dimensional BatchNorm: `axon_nb.parallel.SyncBatchNorm` over all ranks.

    On CPUs, too, where Horovod's refuses to train.

    Args:
        num_features: Channels.
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
        """Shape (samples, channels, …) to the same.

        Raises:
            NotInitializedError: `hvd.init()` comes first.
        """
        current()
        return super().forward(input)
