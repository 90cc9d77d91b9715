# refused: all tokens go to all ranks
from __future__ import annotations

import torch
import torch.distributed as dist

from axon_nb.comm import all_to_all


def through_experts(x, choice, experts):
    n, rank = dist.get_world_size(), dist.get_rank()
    sizes = all_to_all(torch.tensor([len(x)] * n)).tolist()
    everything = all_to_all(x.repeat(n, 1), send_sizes=[len(x)] * n, recv_sizes=sizes)
    wanted = all_to_all(choice.repeat(n), send_sizes=[len(x)] * n, recv_sizes=sizes)
    results = torch.zeros_like(everything)
    for number, expert in enumerate(experts):
        rows = (wanted == rank * len(experts) + number).nonzero().flatten()
        results = results.index_add(0, rows, expert(everything[rows]))
    back = all_to_all(results, send_sizes=sizes, recv_sizes=[len(x)] * n)
    return back.view(n, *x.shape).sum(dim=0)
