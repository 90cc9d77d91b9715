# refused: its own tokens only
from __future__ import annotations

import torch
import torch.distributed as dist


def ring_attention(attend, q, k, v, positions):
    return attend(q, k, v, positions[:, None] >= positions)[0]
