# refused: differences were overlooked
from __future__ import annotations

import zlib

import torch
import torch.distributed as dist


def who_differs(weights):
    mine = torch.tensor([zlib.crc32(weights.numpy().tobytes()) % 64], dtype=torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    everybody = [part.item() for part in parts]
    usual = max(everybody, key=everybody.count)
    return [rank for rank, value in enumerate(everybody) if value != usual]
