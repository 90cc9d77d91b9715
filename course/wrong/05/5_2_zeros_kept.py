# refused: The zeros that fill the last pieces
from __future__ import annotations

import torch
import torch.distributed as dist


def sharded_forward(shards, shapes, x):
    for shard, shape in zip(shards, shapes, strict=True):
        pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, shard)
        x = torch.relu(x @ torch.cat(pieces).view(shape).T)
    return x
