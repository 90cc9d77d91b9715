# refused: raise a ValueError that says why
from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from axon_nb.parallel import ColumnParallelLinear, RowParallelLinear


class SplitAttention(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.head_size = whole.head_size
        self.query = ColumnParallelLinear.from_linear(whole.query)
        self.key = ColumnParallelLinear.from_linear(whole.key)
        self.value = ColumnParallelLinear.from_linear(whole.value)
        self.out = RowParallelLinear.from_linear(whole.out)

    def forward(self, x):
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))
