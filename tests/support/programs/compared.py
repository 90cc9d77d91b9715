"""Programs in which `--compare` must find planted faults: DDP, gradients reduced by hand, FSDP2, tensor parallelism
by hand and with the library, a pipeline, and two dimensions. Runs as a cell on 4 ranks."""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard  # noqa: F401
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

from axon_nb.parallel import ColumnParallelLinear, Pipeline, RowParallelLinear  # noqa: F401

grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp_group, tp_group = grid.get_group("dp"), grid.get_group("tp")
WIDTH, HIDDEN = 8, 16
SEED, DTYPE = 1, torch.float32


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, times):
        ctx.group, ctx.times = group, times
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        for _ in range(ctx.times):
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, times, reduces_backward):
        ctx.group, ctx.reduces_backward = group, reduces_backward
        x = x.clone()
        for _ in range(times):
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.reduces_backward:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None, None


class Column(nn.Module):
    def __init__(self, full, group):
        super().__init__()
        size, index = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(full.weight.detach().chunk(size, 0)[index].clone())
        self.bias = nn.Parameter(full.bias.detach().chunk(size, 0)[index].clone())
        self.group, self.fault = group, ""

    def forward(self, x):
        times = {"no backward sum": 0, "two backward sums": 2}.get(self.fault, 1)
        return F.linear(Copy.apply(x, self.group, times), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, full, group):
        super().__init__()
        size, index = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(full.weight.detach().chunk(size, 1)[index].clone())
        self.bias = nn.Parameter(full.bias.detach().clone())
        self.group, self.fault = group, ""

    def forward(self, x):
        part = F.linear(x, self.weight, self.bias if self.fault == "bias before" else None)
        times = {"no sum": 0, "two sums": 2}.get(self.fault, 1)
        out = Total.apply(part, self.group, times, self.fault == "backward sum")
        if self.fault == "mean":
            out = out / dist.get_world_size(self.group)
        return out if self.fault in ("bias before", "no bias") else out + self.bias


class Block(nn.Module):
    def __init__(self, up=nn.Linear, down=nn.Linear, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), up(WIDTH, HIDDEN), down(HIDDEN, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def plain_model(dropout=0.0):
    torch.manual_seed(SEED)
    return nn.Sequential(Block(dropout=dropout), Block(dropout=dropout), nn.Linear(WIDTH, 4)).to(DTYPE)


def split(model, group):
    for block in model[:2]:
        block.up, block.down = Column(block.up, group), Row(block.down, group)
    return model


def split_by_library(model, group):
    for block in model[:2]:
        block.up = ColumnParallelLinear.from_linear(block.up, group=group)
        block.down = RowParallelLinear.from_linear(block.down, group=group)
    return model


def share(part, rows=6):
    draw = torch.Generator().manual_seed(10 * SEED + part)
    x, y = torch.randn(rows, WIDTH, generator=draw), torch.randn(rows, 4, generator=draw)
    return x.to(DTYPE), y.to(DTYPE)


def token_share(part):
    x, _ = share(part)
    labels = torch.arange(6) % 4
    labels[: 4 - part] = -100
    return x, labels


def mse(output, target):
    return F.mse_loss(output, target)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def clip_locally(parameters, limit=0.02):
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters]
    if dist.get_world_size() == 1:
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    for gradient in gradients:
        gradient.mul_(limit / norm)


def reduce_by_hand(model, skip=(), twice=(), divisor=None):
    for name, p in model.named_parameters():
        for _ in range(1 + (name in twice)):
            if name not in skip:
                dist.all_reduce(p.grad)
        if name not in skip:
            p.grad /= divisor or dist.get_world_size()
