# refused: an arriving token must say which of them it wants
from __future__ import annotations

import torch
import torch.distributed as dist

from axon_nb.comm import all_to_all


def through_experts(x, choice, experts):
    order = choice.argsort(stable=True)
    send_sizes = torch.bincount(choice // len(experts), minlength=dist.get_world_size()).tolist()
    received = all_to_all(torch.tensor(send_sizes)).tolist()
    arrived = all_to_all(x[order], send_sizes=send_sizes, recv_sizes=received)
    parts = arrived.tensor_split(len(experts))
    results = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    back = all_to_all(results, send_sizes=received, recv_sizes=send_sizes)
    return back[order.argsort()]
