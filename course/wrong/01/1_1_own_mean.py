# refused: each rank's own mean
from __future__ import annotations


def mean_loss(losses):
    return losses.mean().item()
