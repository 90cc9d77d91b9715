"""Measures a strategy's wrapper overhead: a wrapped model's step minus the prediction without overhead."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from axon_nb.parallel.data.ddp import DDP
from axon_nb.parallel.data.fsdp import FSDP
from axon_nb.parallel.strategies import ShardingStrategy
from axon_nb.plan.calibration.collectives import AxisBenchmark
from axon_nb.plan.calibration.compute import WARM_UPS, seconds_of
from axon_nb.plan.hardware.links import Link
from axon_nb.plan.hardware.rates import Rates
from axon_nb.plan.timing.step_time import predict_step
from axon_nb.plan.tracing.subject import ModelSource
from axon_nb.plan.tracing.trace import ModelTrace
from axon_nb.plan.traffic.communication import traffic_of
from axon_nb.plan.traffic.layout import ParallelLayout

_WIDTH = 64
"""So small that the host's time counts."""


class _DTensorCounter(TorchDispatchMode):
    """Counts operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.count += 1
            return NotImplemented  # their local tensors come here
        return func(*args, **(kwargs or {}))


def measure_dtensor(bench: AxisBenchmark, *, repeats: int) -> float:
    """Measure the seconds by which each operation on DTensors makes a tensor-parallel step longer.

    The step is that of two small layers. It is compared with the step of plain layers as large as one rank's part, and
    two calls by hand.

    Args:
        bench: Benchmark of all ranks.
        repeats: Number of timings; the median counts.
    """
    mesh = DeviceMesh.from_group(bench.group, bench.device.type)
    width = _WIDTH * bench.num_ranks
    batch = torch.ones(_WIDTH, _WIDTH, device=bench.device, requires_grad=True)
    message = torch.ones_like(batch, requires_grad=False)
    plain, divided = (
        nn.Sequential(nn.Linear(_WIDTH, inner), nn.Linear(inner, _WIDTH)).to(bench.device) for inner in (_WIDTH, width)
    )
    parallelize_module(divided, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

    def stepper(model: nn.Module, num_calls: int) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(batch).sum().backward()
            for _ in range(num_calls):
                dist.all_reduce(message, group=bench.group)
            optimizer.step()
            optimizer.zero_grad()

        return step

    step = stepper(divided, 0)
    step()
    with _DTensorCounter() as counter:
        step()
    longer = seconds_of(bench, step, repeats) - seconds_of(bench, stepper(plain, 2), repeats)
    found: float = max(0.0, longer) / max(1, counter.count)
    return found


def measure_wrappers(
    bench: AxisBenchmark,
    source: ModelSource,
    trace: ModelTrace,
    optimizer: Callable[..., Optimizer] | None,
    *,
    strategies: Sequence[str],
    rates: Rates,
    link: Link,
    overlap: float,
    alone_s: float,
    repeats: int,
) -> Mapping[str, float]:
    """Measure each strategy's overhead in seconds per parameter and step; 0 if a step is no slower than predicted.

    Args:
        bench: Benchmark of all ranks.
        source: The model, its inputs and its loss.
        trace: Trace of its step.
        optimizer: Made from the parameters; None: there is none.
        strategies: ``ddp``, or values of `ShardingStrategy`.
        rates: Fitted to the model.
        link: Between the ranks.
        overlap: The value that `step_time` takes.
        alone_s: Measured seconds of a step without a wrapper, to correct the prediction.
        repeats: Steps after two warm-up steps; the median counts.
    """
    one = ParallelLayout(source, {"dp": 1}, device=bench.device.type, known_trace=trace)
    error_s = alone_s - predict_step(one, traffic_of(one, None), rates, overlap).total_s
    overheads = {}
    for strategy in strategies:
        layout = ParallelLayout(source, {"dp": bench.num_ranks}, strategy, device=bench.device.type, known_trace=trace)
        expected = predict_step(layout, traffic_of(layout, link), rates, overlap).total_s + error_s
        step = _stepper(bench, source, optimizer, strategy)
        taken = []
        for _ in bench.rounds(repeats + WARM_UPS, least=WARM_UPS + 1):
            start = time.perf_counter()
            step()
            bench.synchronize()
            taken.append(time.perf_counter() - start)
        slowest = statistics.median(bench.slowest_of(taken[WARM_UPS:]))
        overheads[strategy] = max(0.0, slowest - expected) / max(1, len(list(layout.trace.model.parameters())))
    return overheads


def _stepper(
    bench: AxisBenchmark, source: ModelSource, optimizer: Callable[..., Optimizer] | None, strategy: str
) -> Callable[[], object]:
    subject = source.real()
    model: nn.Module = subject.model.to(bench.device)
    args = tuple(arg.to(bench.device) if isinstance(arg, torch.Tensor) else arg for arg in subject.args or ())
    wrapped: Any
    if strategy == "ddp":
        wrapped = DDP(model, dist.group.WORLD)
        made = None if optimizer is None else optimizer([p for p in wrapped.parameters() if p.requires_grad])
    else:
        wrapped = FSDP(model, dist.group.WORLD, strategy=ShardingStrategy(strategy))
        made = None if optimizer is None else wrapped.optimizer(optimizer)

    def step() -> None:
        wrapped.zero_grad()
        subject.loss(wrapped(*args)).backward()
        if made is not None:
            made.step()

    return step
