# refused: all but one throw it away
from __future__ import annotations

import torch
import torch.distributed as dist


def whole_weights(shards):
    whole = {}
    for name, shard in shards.items():
        pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, shard)
        whole[name] = torch.cat(pieces)
    return whole if dist.get_rank() == 0 else None
