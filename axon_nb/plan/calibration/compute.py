"""Measures how fast a rank computes while all others do as well."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from axon_nb.plan.calibration.collectives import AxisBenchmark, fit_line
from axon_nb.plan.hardware.rates import PHASES, Rates
from axon_nb.plan.tracing.subject import ModelSource
from axon_nb.plan.tracing.trace import ModelTrace

_SIDES = {"cpu": (96, 192, 320, 512), "cuda": (1024, 2048, 4096, 6144)}
_ELEMENTS = {"cpu": (1 << 14, 1 << 17, 1 << 20), "cuda": (1 << 22, 1 << 24, 1 << 26)}
_OTHER_DTYPES = (torch.float32, torch.bfloat16)
_BEYOND_CACHES = 64 * 1024 * 1024
"""More bytes than any core's cache holds."""
_MAX_COPIES = 8
WARM_UPS = 2
"""Steps of a model that do not count."""
_SCALE = 4
"""Scale of the parameters for the optimizer's second measurement."""


def measure_rates(bench: AxisBenchmark, *, repeats: int, dtype: torch.dtype) -> Rates:
    """Measure the slowest rank's rates of matrix products and of memory-bound operations.

    Args:
        bench: Benchmark of the ranks that compute.
        repeats: Number of timings; the median counts.
        dtype: The dtype of the tensors.
    """
    kind_of_device = bench.device.type if bench.device.type in _SIDES else "cpu"
    moves = []
    for count in _ELEMENTS[kind_of_device]:
        x = torch.ones(count, device=bench.device, dtype=dtype)
        moves.append((2.0 * x.nbytes, seconds_of(bench, functools.partial(torch.mul, x, 2.0), repeats)))
    launch, a_byte = fit_line(moves)
    names = {kind: str(kind).removeprefix("torch.") for kind in (dtype, *_OTHER_DTYPES)}
    by_dtype = {names[kind]: _products_per_s(bench, kind, _SIDES[kind_of_device], repeats) for kind in names}
    return Rates(
        by_dtype[names[dtype]],
        1.0 / a_byte if a_byte else None,
        launch,
        f"measured on {bench.device.type} with {names[dtype]}",
        products=by_dtype,
    )


def _products_per_s(bench: AxisBenchmark, dtype: torch.dtype, sides: Sequence[int], repeats: int) -> float:
    """FLOP/s of matrix products of several sizes."""
    points = []
    for side in sides:
        a, b = (torch.ones(side, side, device=bench.device, dtype=dtype) for _ in range(2))
        points.append((2.0 * side**3, seconds_of(bench, functools.partial(torch.matmul, a, b), repeats)))
    _, a_flop = fit_line(points)
    return 1.0 / (a_flop or min(seconds / flops for flops, seconds in points))


def seconds_of(bench: AxisBenchmark, call: Callable[[], object], repeats: int, count: int = 4) -> float:
    """Return seconds per call on the slowest rank, while all ranks run it.

    Args:
        bench: Benchmark of these ranks.
        call: What to run.
        repeats: Number of timings; the median counts.
        count: Calls in each.
    """
    call()
    taken = []
    for _ in bench.rounds(repeats):
        start = time.perf_counter()
        for _ in range(count):
            call()
        bench.synchronize()
        taken.append((time.perf_counter() - start) / count)
    return bench.slowest(statistics.median(taken))


def measure_overlap(bench: AxisBenchmark, *, repeats: int) -> float:
    """Measure the fraction of an all_reduce, 0 to 1, that concurrent matrix products hide.

    Args:
        bench: Benchmark of the ranks that communicate.
        repeats: Number of timings.
    """
    side = 256 if bench.device.type == "cpu" else 4096
    a = torch.ones(side, side, device=bench.device)
    message = torch.zeros((4 if bench.device.type == "cpu" else 64) * (1 << 20) // 4, device=bench.device)

    def reduce() -> None:
        dist.all_reduce(message, group=bench.group)

    alone = seconds_of(bench, reduce, repeats, 1)
    count = max(1, round(alone / max(seconds_of(bench, lambda: a @ a, repeats), 1e-7)))

    def compute() -> None:
        for _ in range(count):
            _ = a @ a

    def both() -> None:
        work = dist.all_reduce(message, group=bench.group, async_op=True)
        compute()
        if work is not None:
            work.wait()

    computing, overlapped = seconds_of(bench, compute, repeats, 1), seconds_of(bench, both, repeats, 1)
    return min(1.0, max(0.0, (alone + computing - overlapped) / min(alone, computing)))


def measure_phases(
    bench: AxisBenchmark,
    rates: Rates,
    source: ModelSource,
    trace: ModelTrace,
    optimizer: Callable[..., Optimizer] | None,
    *,
    repeats: int,
) -> tuple[Rates, float]:
    """Fit rates to a model's forward, backward and optimizer step, run here without wrappers.

    A small model fits into caches that larger ones exceed, so enough copies of it run in turn to exceed the cache. Each
    step counts with the slowest rank, because ranks wait for it. The optimizer is also measured on larger parameters,
    to separate cost per element from cost per parameter.

    Args:
        bench: Benchmark of all ranks; each runs the model alone, all at the same time.
        rates: The rates to fit.
        source: The model, its inputs and its loss.
        trace: Trace of its step.
        optimizer: Made from the parameters; None: there is no such phase.
        repeats: Steps after two warm-up steps; medians count.

    Returns:
        The rates, and the seconds of a step of one copy.
    """
    alone = _phases(bench, source, optimizer, copies=1, repeats=repeats)
    weights = sum(parameter.nbytes for _, parameter in trace.parameters)
    held = sum(trace.saved.values()) + 4 * weights  # with gradients and two optimizer states
    copies = min(_MAX_COPIES, max(1, round(_BEYOND_CACHES / max(1, held))))
    many = alone if copies == 1 else _phases(bench, source, optimizer, copies=copies, repeats=repeats)
    works = {phase: trace.total(phase) for phase in PHASES if trace.total(phase).ops}
    measured = {phase: (work.times(copies), many[phase]) for phase, work in works.items()}
    fitted = rates.fitted(measured, f"fitted to {type(trace.model).__name__}")
    # Launch overhead of a large model is negligible.
    if optimizer is not None and "optimizer" in works and weights <= _BEYOND_CACHES:
        points = [
            (rates.busy_s(works["optimizer"]) * size, _optimizer_s(bench, source, optimizer, size, repeats=repeats))
            for size in (1, _SCALE)
        ]
        start, slope = fit_line(points) if all(seconds > 0 for _, seconds in points) else (0.0, 0.0)
        if slope > 0:
            factors = {**fitted.factors, "optimizer": slope}
            fitted = replace(fitted, factors=factors, launches={"optimizer": start / works["optimizer"].ops})
    return fitted, sum(alone.values())


def _optimizer_s(
    bench: AxisBenchmark, source: ModelSource, optimizer: Callable[..., Optimizer], size: int, *, repeats: int
) -> float:
    """Seconds of the optimizer's step on parameters with `size` times the elements."""
    parameters = []
    for known in source.real().model.parameters():
        if known.requires_grad and known.ndim:
            shape = (size * known.shape[0], *known.shape[1:])
            parameters.append(nn.Parameter(torch.ones(shape, dtype=known.dtype, device=bench.device)))
    if not parameters:
        return 0.0
    made = optimizer(parameters)
    taken = []
    for _ in bench.rounds(repeats + WARM_UPS, least=WARM_UPS + 1):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        start = time.perf_counter()
        made.step()
        bench.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(bench.slowest_of(taken[WARM_UPS:]))


def _phases(
    bench: AxisBenchmark, source: ModelSource, optimizer: Callable[..., Optimizer] | None, *, copies: int, repeats: int
) -> dict[str, float]:
    """Seconds per phase of some copies of a model, on the slowest rank."""
    subjects = [source.real() for _ in range(copies)]
    models: list[nn.Module] = [subject.model.to(bench.device) for subject in subjects]
    args = tuple(arg.to(bench.device) if isinstance(arg, torch.Tensor) else arg for arg in subjects[0].args or ())
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    made = optimizer(trained) if optimizer is not None else None
    taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in bench.rounds(repeats + WARM_UPS, least=WARM_UPS + 1):
        for model in models:
            model.zero_grad()
        moments = [time.perf_counter()]
        numbers = [subject.loss(model(*args)) for subject, model in zip(subjects, models, strict=True)]
        bench.synchronize()
        moments.append(time.perf_counter())
        for number in numbers:
            number.backward()
        bench.synchronize()
        moments.append(time.perf_counter())
        if made is not None:
            made.step()
            bench.synchronize()
        moments.append(time.perf_counter())
        for place, phase in enumerate(PHASES):
            taken[phase].append(moments[place + 1] - moments[place])
    return {phase: statistics.median(bench.slowest_of(taken[phase][WARM_UPS:])) for phase in PHASES}
