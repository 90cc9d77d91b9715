"""In the shape of pytorch/examples, distributed/ddp/example.py: main() calls the function that trains."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank):
    print(f"[{os.getpid()}] rank = {dist.get_rank()}, " + f"world_size = {dist.get_world_size()}")

    torch.manual_seed(0)
    model = ToyModel()
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.1)

    # The same numbers in every run, and others on each rank.
    torch.manual_seed(100 + rank)
    for step in range(4):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}")


def main():
    env_dict = {key: os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")}
    rank = int(env_dict["RANK"])
    if sys.platform == "win32":
        dist.init_process_group(backend="gloo", init_method="file:///c:/tmp/store", rank=rank, world_size=2)
    else:
        dist.init_process_group(backend="gloo")
    print(f"backend = {dist.get_backend()}", end="\n")
    demo_basic(rank)
    # Tear down the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
