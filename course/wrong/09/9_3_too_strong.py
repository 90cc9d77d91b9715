# refused: It is so strong
from __future__ import annotations

import torch.nn.functional as F


def balance_loss(scores, choice):
    visits = F.one_hot(choice.flatten(), scores.shape[1]).float().mean(0)
    return 100 * scores.shape[1] * (visits * scores.mean(0)).sum()
