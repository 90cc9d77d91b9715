# refused: more work than needed is done again
from __future__ import annotations

import torch
import torch.distributed as dist


def last_common(snapshots):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, snapshots)
    step = min(set.intersection(*(set(part) for part in everybody if part)))
    giver = next(part for part in everybody if part)
    return step, giver[step]
