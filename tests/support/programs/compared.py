"""Programs in which `--compare` must find planted faults: DDP, gradients reduced by hand, FSDP2, tensor parallelism
by hand and with the library, a pipeline, and two dimensions. Runs as a cell on 4 ranks.

Faults are planted with SEED 1; every other seed draws another model, loss, optimizer and batch."""

import math
import random

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
    def __init__(self, hidden, act, norm, dropout=0.0, is_residual=True):
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.act, self.drop, self.is_residual = act, nn.Dropout(dropout), is_residual

    def forward(self, x):
        out = self.drop(self.down(self.act(self.up(self.norm(x)))))
        return x + out if self.is_residual else out


def drawn(what, usual, *others):
    """What the seed chooses; the usual one if it is 1."""
    return random.Random(f"{what} {SEED}").choice([usual, *others]) if SEED != 1 else usual


def plain_model(dropout=0.0):
    torch.manual_seed(SEED)
    blocks = [
        Block(
            drawn(f"hidden {number}", 16, 8, 32),
            drawn(f"act {number}", F.gelu, F.relu, F.silu, torch.tanh),
            drawn(f"norm {number}", nn.LayerNorm, nn.RMSNorm, nn.Identity),
            dropout or drawn(f"dropout {number}", 0.0, 0.1, 0.5),
            drawn(f"residual {number}", True, False),
        )
        for number in range(2)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4, bias=drawn("bias", True, False))).to(DTYPE)


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
    shape = (rows * drawn("rows", 1, 2), *drawn("words", (), (5,)))
    x, y = torch.randn(*shape, WIDTH, generator=draw), torch.randn(*shape, 4, generator=draw)
    return x.to(DTYPE), y.to(DTYPE)


def token_share(part):
    x, _ = share(part)
    labels = torch.arange(6) % 4
    labels[: 4 - part] = -100
    return x, labels


def mse(output, target):
    return F.mse_loss(output, target)


def soft_cross_entropy(output, target):
    return -(target.softmax(-1) * output.log_softmax(-1)).sum(-1).mean()


def criterion(output, target):
    return drawn("loss", mse, F.smooth_l1_loss, soft_cross_entropy)(output, target)


def optimizer_of(parameters):
    kinds = {
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "plain": lambda: torch.optim.SGD(parameters, lr=0.05, weight_decay=0.01),
        "AdamW": lambda: torch.optim.AdamW(parameters, lr=0.01),
        "Adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.01),
    }
    return kinds[drawn("optimizer", *kinds)]()


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
