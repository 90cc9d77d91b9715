# refused: their positions have stayed at home
from __future__ import annotations

import torch
import torch.distributed as dist


def ring_attention(attend, q, k, v, positions):
    rank, n = dist.get_rank(), dist.get_world_size()
    key_positions = positions
    for step in range(n):
        if step < n - 1:
            incoming = [torch.empty_like(tensor) for tensor in (k, v, key_positions)]
            works = [dist.isend(tensor, (rank + 1) % n) for tensor in (k, v, key_positions)]
            works += [dist.irecv(tensor, (rank - 1) % n) for tensor in incoming]
        mask = positions[:, None] >= positions
        new, new_lse = attend(q, k, v, mask)
        if step == 0:
            out, lse = new, new_lse
        else:
            share = torch.sigmoid(new_lse - lse)[:, None]
            out, lse = out + share * (new - out), torch.logaddexp(lse, new_lse)
        if step < n - 1:
            for work in works:
                work.wait()
            k, v, key_positions = incoming
    return out
