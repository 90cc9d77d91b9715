# refused: An expert that nobody visits was left out
from __future__ import annotations

import torch
import torch.distributed as dist

from axon_nb.comm import all_to_all


def through_experts(x, choice, experts):
    order = choice.argsort(stable=True)
    send_sizes = torch.bincount(choice // len(experts), minlength=dist.get_world_size()).tolist()
    received = all_to_all(torch.tensor(send_sizes)).tolist()
    arrived = all_to_all(x[order], send_sizes=send_sizes, recv_sizes=received)
    wanted = all_to_all(choice[order], send_sizes=send_sizes, recv_sizes=received) % len(experts)
    results = torch.zeros_like(arrived.detach())
    for number, expert in enumerate(experts):
        rows = (wanted == number).nonzero().flatten()
        if len(rows):
            results = results.index_add(0, rows, expert(arrived[rows]))
    back = all_to_all(results, send_sizes=received, recv_sizes=send_sizes)
    return back[order.argsort()]
