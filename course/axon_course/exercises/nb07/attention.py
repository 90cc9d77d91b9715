"""Attention to some of the keys, as the notebook defines it."""

from __future__ import annotations

import math

import torch


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of each query to these keys, and the log of the sum of their weights.

    Args:
        q: Queries, shape (queries, width).
        k: Keys, shape (keys, width).
        v: Values, shape (keys, width).
        mask: Shape (queries, keys): which query may look at which key; None: at all.

    Returns:
        Shapes (queries, width) and (queries,). A query that may look at nothing has zeros, and -inf.
    """
    scores = q @ k.T / math.sqrt(q.shape[1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(dim=1)
    weights = (scores - lse[:, None]).exp().nan_to_num(0.0)  # -inf less -inf is no number
    return weights @ v, lse


def looks_back(positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """Return which token may look at which: at itself, and at those before it."""
    return positions[:, None] >= key_positions
