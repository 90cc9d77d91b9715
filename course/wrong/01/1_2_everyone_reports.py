# refused: only rank 0 reports
from __future__ import annotations

import torch.distributed as dist


def report_total(value):
    dist.all_reduce(value)
    return f"the total is {value.item():g}"
