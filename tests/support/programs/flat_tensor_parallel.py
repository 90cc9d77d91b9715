"""Trains a small model with tensor parallelism.

In the shape of pytorch/examples, distributed/tensor_parallelism/tensor_parallel_example.py: no function at all, and
the mesh creates the group.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if sys.version_info < (3, 10):
    print("This needs a newer Python. Exiting.")
    sys.exit()

from torch.distributed.device_mesh import init_device_mesh


class ToyModel(nn.Module):
    """A small perceptron."""

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


"""
The demo itself.
"""

_world_size = int(os.environ["WORLD_SIZE"])
device_mesh = init_device_mesh(device_type="cpu", mesh_shape=(_world_size,))
_rank = device_mesh.get_rank()


def rank_log(message):
    """Print on all ranks, each with its number."""
    print(f"rank {_rank} {message}")


assert _world_size % 2 == 0, f"this example needs an even number of ranks, but got {_world_size}"

torch.manual_seed(3)
tp_model = ToyModel()
tp_model = parallelize_module(
    module=tp_model,
    device_mesh=device_mesh,
    parallelize_plan={"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()},
)

lr = 0.25
optimizer = torch.optim.AdamW(tp_model.parameters(), lr=lr, foreach=True)

num_iters = 4
for i in range(num_iters):
    # The input must be the same on all ranks.
    torch.manual_seed(i)
    inp = torch.rand(20, 10)
    output = tp_model(inp)
    loss = output.square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    rank_log(f"step {i} loss {loss.item()!r}")

if dist.is_initialized():
    dist.destroy_process_group()
