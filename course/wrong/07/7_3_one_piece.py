# refused: Each rank has one piece of the text
from __future__ import annotations

import torch
import torch.distributed as dist


def my_tokens(length):
    return torch.arange(length).chunk(dist.get_world_size())[dist.get_rank()]
