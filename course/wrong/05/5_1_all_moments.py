# refused: still keeps both moments
from __future__ import annotations

import torch
import torch.distributed as dist


class ZeroAdam:
    def __init__(self, parameters, lr=1e-3):
        self.parameters = list(parameters)
        self.adam = torch.optim.Adam(self.parameters, lr=lr)

    def step(self):
        for weight in self.parameters:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
        self.adam.step()
