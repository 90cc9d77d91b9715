"""Layer norm for sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axon_nb.comm.group import GroupLike, resolve
from axon_nb.parallel.tensor.functions import copy_to_ranks

__all__ = ["SequenceParallelNorm"]


class SequenceParallelNorm(nn.LayerNorm):
    """`nn.LayerNorm` on this rank's positions; gradients of its parameters are summed over ranks.

    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.2.2.

    Args:
        features: Size of the last dimension.
        group: The ranks that share the sequence; None means all.
        **kwargs: Arguments of `nn.LayerNorm`.
    """

    def __init__(self, features: int, *, group: GroupLike = None, **kwargs: Any) -> None:
        super().__init__(features, **kwargs)
        self.group = resolve(group)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.LayerNorm calls it
        """Normalise (…, positions / ranks, features)."""
        parameters: tuple[torch.Tensor | None, ...] = (self.weight, self.bias)
        weight, bias = (None if part is None else copy_to_ranks(part, self.group) for part in parameters)
        return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
