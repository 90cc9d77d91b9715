# refused: gradients stop where tokens travel
from __future__ import annotations

import torch
import torch.distributed as dist

from axon_nb.comm import all_to_all


def exchange(rows, send_sizes, received):
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.detach(), received, send_sizes)
    return arrived


def through_experts(x, choice, experts):
    order = choice.argsort(stable=True)
    send_sizes = torch.bincount(choice // len(experts), minlength=dist.get_world_size()).tolist()
    received = all_to_all(torch.tensor(send_sizes)).tolist()
    arrived = exchange(x[order], send_sizes, received)
    wanted = exchange(choice[order], send_sizes, received) % len(experts)
    rows = [(wanted == number).nonzero().flatten() for number in range(len(experts))]
    results = torch.cat([expert(arrived[mine]) for expert, mine in zip(experts, rows, strict=True)])
    results = results[torch.cat(rows).argsort()]
    return exchange(results, received, send_sizes)[order.argsort()]
