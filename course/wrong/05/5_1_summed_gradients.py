# refused: added up, not averaged
from __future__ import annotations

import torch
import torch.distributed as dist


class ZeroAdam:
    def __init__(self, parameters, lr=1e-3):
        self.parameters = list(parameters)
        mine = self.parameters[dist.get_rank() :: dist.get_world_size()]
        self.adam = torch.optim.Adam(mine, lr=lr) if mine else None

    def step(self):
        for weight in self.parameters:
            dist.all_reduce(weight.grad)
        if self.adam is not None:
            self.adam.step()
        for index, weight in enumerate(self.parameters):
            dist.broadcast(weight.data, src=index % dist.get_world_size())
