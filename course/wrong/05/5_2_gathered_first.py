# refused: All layers are whole at the same time
from __future__ import annotations

import torch
import torch.distributed as dist


def sharded_forward(shards, shapes, x):
    weights = []
    for shard, shape in zip(shards, shapes, strict=True):
        pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, shard)
        weights.append(torch.cat(pieces)[: shape.numel()].view(shape))
    for weight in weights:
        x = torch.relu(x @ weight.T)
    return x
