# refused: only rank 0 saves
from __future__ import annotations

import torch
import torch.distributed as dist


def whole_weights(shards):
    whole = {}
    for name, shard in shards.items():
        is_saver = dist.get_rank() == 0
        pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())] if is_saver else None
        dist.gather(shard, pieces, dst=0)
        if is_saver:
            whole[name] = torch.cat(pieces)
    return whole
