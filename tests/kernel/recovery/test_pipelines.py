"""Pipelines continue after a step that failed half-way, including the first."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

PIPELINE = """%%distributed
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        blow("forward")
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        blow("backward")
        return grad

class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return Fuse.apply(self.linear(x))

def blow(where):
    if where == armed and rank == 2:
        raise ValueError("bug")

def build():
    global parts, schedules
    torch.manual_seed(rank)
    parts = nn.ModuleList(Stage() for _ in range(3))
    places = ((rank, world_size), (rank, 2 * world_size), (rank + world_size, 2 * world_size))
    stages = [PipelineStage(part, *place, torch.device("cpu")) for part, place in zip(parts, places)]
    schedules = [
        Schedule1F1B(stages[0], 4, loss_fn=nn.functional.mse_loss),
        ScheduleInterleaved1F1B(stages[1:], 4, loss_fn=nn.functional.mse_loss),
    ]

def run(which):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    last = {"target": torch.zeros(8, 8), "losses": []} if rank == world_size - 1 else {}
    parts.zero_grad()
    schedules[which].step(*(x,) if rank == 0 else (), **last)
    return torch.stack([p.grad for p in parts.parameters() if p.grad is not None and p.dim() == 2])

armed = ""
build()
good = [run(0), run(1)]
"""


@pytest.mark.parametrize("first", [True, False], ids=["its first step", "a later step"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("which", [0, 1], ids=["1F1B", "interleaved"])
def test_pipeline_continues_after_a_failure_in(kernel: Kernel, which: int, where: str, first: bool) -> None:
    kernel.ok(PIPELINE)
    if first:
        kernel.ok("%%distributed\nbuild()")
    reply = kernel.run(f"%%distributed\narmed = {where!r}\nrun({which})")
    assert "ValueError: bug" in reply.traceback
    after = kernel.ok(f"%%distributed\narmed = ''\ntorch.equal(run({which}), good[{which}])")
    assert after.lines() == ["[ranks 0-3] True"]
