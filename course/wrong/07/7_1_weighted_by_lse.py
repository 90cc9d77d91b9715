# refused: It is the *logarithm* of their weight
from __future__ import annotations

import torch


def merge(out, lse, out2, lse2):
    total = (lse + lse2)[:, None]
    return (lse[:, None] * out + lse2[:, None] * out2) / total, torch.logaddexp(lse, lse2)
