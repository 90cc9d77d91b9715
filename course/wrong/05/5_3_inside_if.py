# refused: Only some ranks take part
from __future__ import annotations

import torch
import torch.distributed as dist


def whole_weights(shards):
    if dist.get_rank() != 0:
        return None
    whole = {}
    for name, shard in shards.items():
        pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.gather(shard, pieces, dst=0)
        whole[name] = torch.cat(pieces)
    return whole
