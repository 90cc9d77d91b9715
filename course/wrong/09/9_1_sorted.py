# refused: in the order in which they travelled
from __future__ import annotations

import torch
import torch.distributed as dist

from axon_nb.comm import all_to_all


def through_experts(x, choice, experts):
    order = choice.argsort(stable=True)
    owners = choice // len(experts)
    send_sizes = torch.bincount(owners, minlength=dist.get_world_size()).tolist()
    received = all_to_all(torch.tensor(send_sizes)).tolist()
    arrived = all_to_all(x[order], send_sizes=send_sizes, recv_sizes=received)
    wanted = all_to_all(choice[order], send_sizes=send_sizes, recv_sizes=received) % len(experts)
    rows = [(wanted == number).nonzero().flatten() for number in range(len(experts))]
    results = torch.cat([expert(arrived[mine]) for expert, mine in zip(experts, rows, strict=True)])
    results = results[torch.cat(rows).argsort()]
    return all_to_all(results, send_sizes=received, recv_sizes=send_sizes)
