# refused: Only some ranks call the collective
from __future__ import annotations

import torch.distributed as dist


def report_total(value):
    if dist.get_rank() == 0:
        dist.all_reduce(value)
        return f"the total is {value.item():g}"
