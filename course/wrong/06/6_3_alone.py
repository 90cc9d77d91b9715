# refused: no whole sum for any of them
from __future__ import annotations

import torch.nn.functional as F


def sequence_mlp(x, up, down):
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up.T) @ down.T
