# refused: Rank 0 may be the one that is wrong
from __future__ import annotations

import zlib

import torch
import torch.distributed as dist


def who_differs(weights):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, zlib.crc32(weights.numpy().tobytes()))
    return [rank for rank, value in enumerate(everybody) if value != everybody[0]]
