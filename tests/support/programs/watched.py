"""Small programs whose numbers are watched, and faults that are planted in them; runs in a cell on 4 ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from axon_nb.comm.placements import declare_placements

WIDTH, STEPS = 8, 5


class Root(nn.Module):
    """The square root of the size of what it gets; `shift` moves one number to where that is not a number."""

    def __init__(self):
        super().__init__()
        self.shift = 0.0

    def forward(self, x):
        return torch.sqrt(x.square() + 0.1 - self.shift)


def plain_model():
    """Create the same model on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Root(), nn.Linear(WIDTH, WIDTH))


def ddp():
    return DistributedDataParallel(plain_model())


def hsdp():
    model = plain_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel():
    model, mesh = plain_model(), init_device_mesh("cpu", (4,))
    for parameter in model[0].parameters():
        declare_placements(parameter, mesh, [Replicate()])
    return parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def flip(tensor, element, bit):
    """Flip one bit of a float32 tensor."""
    words = local(tensor).view(-1).view(torch.int32)
    words[element % words.numel()] ^= (1 << bit) - (1 << 32) * (bit == 31)


def train(model, fault=None, steps=STEPS, batch=lambda step: 4):
    """Train; `fault` is None, or (kind, rank, step, index of the parameter, element, bit)."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank() * same_batch_factor(model))
    for step in range(steps):
        x = torch.randn(batch(step), WIDTH, generator=generator)
        kind, *where = fault if fault and fault[1:3] == (dist.get_rank(), step) else ("", 0, 0, 0, 0, 0)
        parameter, element, bit = parameters[where[2]], where[3], where[4]
        if kind == "weight":
            flip(parameter, element, bit)
        if kind == "weight nan":
            local(parameter.data).view(-1)[0] = float("nan")
        if kind == "input nan":
            x[0, 0] = float("nan")
        if kind == "forward nan":
            next(part for part in model.modules() if isinstance(part, Root)).shift = 1e6
        loss = model(x).square().mean()
        if kind == "loss nan":
            loss = loss * float("nan")
        loss.backward()
        if kind == "gradient":
            flip(parameter.grad, element, bit)
        if kind == "gradient nan":
            local(parameter.grad).view(-1)[0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
    return model


def same_batch_factor(model):
    """0 if all ranks must have the same batch, else 1."""
    return int(isinstance(model, DistributedDataParallel) or hasattr(model, "reshard"))
