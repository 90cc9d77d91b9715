# refused: the others' pieces are missing
from __future__ import annotations

import torch.distributed as dist


def whole_weights(shards):
    return dict(shards) if dist.get_rank() == 0 else None
