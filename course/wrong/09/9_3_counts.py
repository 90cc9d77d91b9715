# refused: a count has no gradient
from __future__ import annotations

import torch.nn.functional as F


def balance_loss(scores, choice):
    visits = F.one_hot(choice.flatten(), scores.shape[1]).float().mean(0)
    return scores.shape[1] * visits.square().sum()
