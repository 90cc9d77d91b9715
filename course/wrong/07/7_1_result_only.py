# refused: it must return two tensors
from __future__ import annotations

import torch


def merge(out, lse, out2, lse2):
    share = torch.sigmoid(lse2 - lse)[:, None]
    return out + share * (out2 - out)
