"""What operations cost: the time to issue them, grouped products, and those whose work is unknown."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from axon_nb import plan
from axon_nb.parallel.models import GPTConfig
from axon_nb.plan.tracing.subject import ModelSource
from axon_nb.plan.tracing.trace import trace_model

CONFIG = GPTConfig(vocab=96, context=32, hidden=64, heads=4, blocks=3)


def test_small_model_is_bound_by_launch_time() -> None:
    small = GPTConfig(vocab=256, context=64, hidden=64, heads=4, blocks=4)
    found = plan.step_time(small, 1, rates="h100")
    trace = trace_model(ModelSource(small), optimizer=torch.optim.AdamW)
    ops = sum(trace.total(phase).ops for phase in ("forward", "backward", "optimizer"))
    assert found.total_s == pytest.approx(ops * 5e-6, rel=0.01)
    assert "the host issues an operation in 5 us (assumed)" in str(found)
    graphs = plan.step_time(small, 1, rates="h100", cuda_graphs=True)
    assert graphs.total_s < 0.1 * found.total_s
    assert all(seconds >= 5e-6 for part, seconds in graphs.parts.items() if part.startswith("compute"))
    assert "one CUDA graph per phase" in str(graphs)
    slow = plan.Rates(1e12, 1e12, launch_s=1e-3)
    saved = (
        plan.step_time(small, 1, rates=slow).total_s - plan.step_time(small, 1, rates=slow, cuda_graphs=True).total_s
    )
    assert saved == pytest.approx((ops - 3) * 1e-3)
    assert plan.step_time(small, 1, rates="h100", compiled=True).total_s < 0.7 * found.total_s
    large = GPTConfig(vocab=32_000, context=2048, hidden=4096, heads=32, blocks=2)
    free = dataclasses.replace(plan.GPUS["h100"], issue_s=0)
    times = [plan.step_time(large, 1, batch=4, rates=rates).parts["compute, backward"] for rates in ("h100", free)]
    assert times[0] == times[1]


def test_grouped_products_count_as_products() -> None:
    rows, wide, deep, groups = 24, 16, 32, 3

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(groups, wide, deep, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([8, 16, 24], dtype=torch.int32)
            return torch.nn.functional.grouped_mm(x * 1, self.weight, offs=ends)

    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(rows, wide, dtype=dtype, requires_grad=True)
        trace = trace_model(ModelSource(lambda dtype=dtype: Experts().to(dtype), x))
        assert trace.total("forward").flops == 2 * rows * wide * deep
        assert trace.total("backward").flops == 2 * 2 * rows * wide * deep


def test_metadata_queries_and_allocations_are_free() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.ops.aten.is_pinned(x)
            torch.empty_like(x)
            return x.view(-1) if x.device.type == "cpu" else x

    x = torch.zeros(8, 4, requires_grad=True)
    trace = trace_model(ModelSource(Asks, x, loss=lambda y: y.sum()))
    work = trace.total("forward")
    assert work.ops == 1  # the sum
    assert work.bytes == 8 * 4 * 4 + 4


def test_operations_of_unknown_flops_are_reported() -> None:
    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve(self.weight, x)

    found = plan.step_time(Solver, 1, inputs=torch.zeros(32, 4), rates=plan.Rates(1e12, 1e12))
    assert "only the bytes of aten._linalg_solve_ex" in str(found)
    assert "only the bytes" not in str(plan.step_time(CONFIG, 1, rates=plan.Rates(1e12, 1e12)))
