# refused: Who adds them up
from __future__ import annotations

import torch.nn.functional as F


def split_mlp(x, up, up_bias, down, down_bias):
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
