"""A cell that creates a DDP model, an FSDP2 model and their optimizers, the same on all ranks."""

from __future__ import annotations

SETUP = """%%distributed
import time
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

pair, rest = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
ddp = DDP(Net(), bucket_cap_mb=0.005)
ddp_optimizer = torch.optim.Adam(ddp.parameters(), 1e-3)
sharded = Net()
mesh = init_device_mesh("cpu", (world_size,))
for layer in sharded.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
sharded_optimizer = torch.optim.Adam(sharded.parameters(), 1e-3)
steps = 0

def step():
    global steps
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * steps + rank))
    for model, optimizer in ((ddp, ddp_optimizer), (sharded, sharded_optimizer)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    steps += 1

def weights():
    own = torch.cat([p.data.flatten() for p in ddp.module.parameters()])
    others = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(others, own)
    assert all(torch.equal(own, other) for other in others), "replicas differ"
    full = torch.cat([p.full_tensor().flatten() for p in sharded.parameters()])
    return own.double().sum().item(), full.double().sum().item()

def groups_work():
    total = torch.ones(1)
    if rank in (0, 1):
        dist.all_reduce(total, group=pair)
    if rank in (1, 2, 3):
        dist.all_reduce(total, group=rest)
    return total.item()

step()
"""
