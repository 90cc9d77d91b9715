"""Programs with a planted cost each, for `benchmarks.advice`: computing is sleep, and links are slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass, field

from axon_nb.records.slowness import SlowLink, Slowness

DEFINE = '''
import gc, time
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from axon_nb.parallel import Pipeline

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None, None

class Layer(nn.Module):
    """Computes for these milliseconds per row, and has a parameter of this many elements."""
    def __init__(self, size, forward_ms, backward_ms):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 0.5))
        self.times = forward_ms / 1e3, backward_ms / 1e3
    def forward(self, x):
        return Sleep.apply(x * self.weight[: x.shape[-1]], *(len(x) * seconds for seconds in self.times))

def net(layers, size, forward_ms=10, backward_ms=20):
    return nn.Sequential(*[Layer(size, forward_ms, backward_ms) for _ in range(layers)])

class Examples(torch.utils.data.Dataset):
    def __init__(self, ms):
        self.ms = ms
    def __len__(self):
        return 64
    def __getitem__(self, number):
        time.sleep(self.ms / 1e3)
        return torch.ones(1, 8)

def loader(ms, **options):
    return iter(torch.utils.data.DataLoader(Examples(ms), batch_size=None, **options))

def nothing(*_):
    pass

def train(model, after=nothing, batches=None, passes=1, no_sync=False):
    """Return the median seconds of eight steps."""
    optimizer, ends = torch.optim.SGD(model.parameters(), lr=0.01), []
    dist.barrier()
    for step in range(10):
        batch = torch.ones(1, 8) if batches is None else next(batches)
        for number in range(passes):
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = not no_sync or number == passes - 1
            model(batch).sum().backward()
        after(model)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
    return sorted(b - a for a, b in zip(ends[1:], ends[2:]))[4]

def pipeline(times, num_microbatches):
    """Steps of a pipeline with one stage per rank, each of which computes for these milliseconds per row."""
    pipe = Pipeline([Layer(8, ms, 2 * ms) for ms in times], num_microbatches=num_microbatches, schedule="1F1B",
                    loss=lambda output, target: output.sum())
    optimizer, ends = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01), []
    for step in range(10):
        pipe.step(torch.ones(8, 8), torch.ones(8, 8))
        optimizer.step()
        ends.append(time.monotonic())
    return sorted(b - a for a, b in zip(ends[1:], ends[2:]))[4]

def sum_each(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

def sum_joined(model):
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)

def compressed(model):
    model.register_comm_hook(None, fp16_compress_hook)
    return model

def sharded(reshard):
    model = net(4, 400_000, 5, 10)
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)

def collect(model):
    gc.collect()

junk = [[number] for number in range(60_000)]
'''
LINK = Slowness().with_link(SlowLink((), 0.004, 400.0))
LATE = Slowness().with_link(SlowLink((), 0.01))


@dataclass(frozen=True)
class Planted:
    """A program with a cost, and the same with the change applied."""

    name: str
    cause: str
    code: str
    changed: str
    slowness: Slowness = field(default_factory=Slowness)


PLANTED = (
    Planted(
        "one rank logs for 60 ms",
        "straggler: own code",
        "train(DDP(net(4, 50_000)), lambda _: time.sleep(0.06 * (rank == 1)))",
        "train(DDP(net(4, 50_000)))",
    ),
    Planted(
        "one rank's forward is longer",
        "straggler: forward",
        "train(DDP(net(4, 50_000, 10 + 15 * (rank == 1))))",
        "train(DDP(net(4, 50_000)))",
    ),
    Planted(
        "one rank's backward is longer",
        "straggler: backward",
        "train(DDP(net(4, 50_000, 10, 20 + 15 * (rank == 1))))",
        "train(DDP(net(4, 50_000)))",
    ),
    Planted(
        "one rank's data is slow",
        "straggler: data",
        "train(DDP(net(4, 50_000)), batches=loader(60 * (rank == 1)))",
        "train(DDP(net(4, 50_000)), batches=loader(0))",
    ),
    Planted(
        "one rank collects garbage",
        "straggler: gc",
        "train(DDP(net(4, 50_000)), collect if rank == 1 else nothing)",
        "train(DDP(net(4, 50_000)))",
    ),
    Planted(
        "all ranks load data in the step",
        "data loading",
        "train(DDP(net(4, 50_000)), batches=loader(60))",
        "train(DDP(net(4, 50_000)), batches=loader(60, num_workers=2))",
    ),
    Planted(
        "all ranks collect garbage",
        "garbage collection",
        "train(DDP(net(4, 50_000)), collect)",
        "train(DDP(net(4, 50_000)))",
    ),
    Planted(
        "three backwards, all summed",
        "no_sync",
        "train(DDP(net(2, 400_000)), passes=3)",
        "train(DDP(net(2, 400_000)), passes=3, no_sync=True)",
        LINK,
    ),
    Planted(
        "DDP with tiny buckets",
        "small buckets",
        "train(DDP(net(12, 2_000, 2, 4), bucket_cap_mb=0.001))",
        "train(DDP(net(12, 2_000, 2, 4), bucket_cap_mb=25))",
        LATE,
    ),
    Planted(
        "an all_reduce per small parameter",
        "small buckets",
        "train(net(12, 2_000, 5, 10), sum_each)",
        "train(net(12, 2_000, 5, 10), sum_joined)",
        LATE,
    ),
    Planted(
        "sums after the backward",
        "exposed communication",
        "train(net(4, 400_000, 10, 30), sum_each)",
        "train(DDP(net(4, 400_000, 10, 30)))",
        LINK,
    ),
    Planted("FSDP gathers twice", "resharding", "train(sharded(True))", "train(sharded(False))", LINK),
    Planted(
        "gradients too large for the link",
        "communication",
        "train(DDP(net(2, 800_000)))",
        "train(compressed(DDP(net(2, 800_000))))",
        LINK,
    ),
    Planted("a pipeline with two microbatches", "bubble", "pipeline([5, 5], 2)", "pipeline([5, 5], 4)"),
    Planted("a pipeline with an uneven stage", "uneven stages", "pipeline([3, 9], 4)", "pipeline([6, 6], 4)"),
)
BALANCED = (
    Planted("balanced DDP", "", "train(DDP(net(4, 50_000)))", ""),
    Planted("balanced FSDP", "", "train(sharded(False))", ""),
)
