# refused: They must agree on one
from __future__ import annotations

import torch
import torch.distributed as dist


def last_common(snapshots):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, snapshots)
    everything = {step: weights for part in everybody for step, weights in part.items()}
    step = max(snapshots or everything)
    return step, everything[step]
