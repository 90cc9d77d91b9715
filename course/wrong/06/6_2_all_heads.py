# refused: Every rank keeps all heads
from __future__ import annotations

import torch.distributed as dist
from torch import nn


class SplitAttention(nn.Module):
    def __init__(self, whole):
        super().__init__()
        heads = whole.query.out_features // whole.head_size
        if heads % dist.get_world_size():
            raise ValueError(f"{heads} heads cannot be shared by {dist.get_world_size()} ranks")
        self.whole = whole

    def forward(self, x):
        return self.whole(x)
