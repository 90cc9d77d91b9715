# refused: rank 0's own value
from __future__ import annotations

import torch.distributed as dist


def report_total(value):
    if dist.get_rank() == 0:
        return f"the total is {value.item():g}"
