"""Benchmarks on running ranks: collectives, computation while all ranks compute, and the overhead of wrappers.

Every rank makes these calls together, and all get the same results. A wrapper's overhead is a wrapped model's step
minus the prediction without overhead.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from axon_nb.comm.collectives.direct import all_gather_single, reduce_scatter_single
from axon_nb.parallel.data.ddp import DDP
from axon_nb.parallel.data.sharded_model import FSDP
from axon_nb.parallel.memory import ShardingStrategy
from axon_nb.plan.calibration.result import Sample
from axon_nb.plan.hardware import PHASES, Cost, Link, Rates, rounds_and_volume
from axon_nb.plan.timing import predict_step
from axon_nb.plan.tracing.subject import ModelSource
from axon_nb.plan.tracing.trace import ModelTrace
from axon_nb.plan.traffic.communication import traffic_of
from axon_nb.plan.traffic.layout import ParallelLayout

MEASURED_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
"""Operations that are measured, in this order."""
_CALLS = 4
"""Calls per timing."""
_LIMIT_S = 3.0
"""Seconds after which a measurement is not repeated again."""
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
_WIDTH = 64
"""So small that the host's time counts."""


class AxisBenchmark:
    """Benchmarks one axis.

    Args:
        axis: Its name.
        group: torch's group of this rank along the axis.
        device: Where tensors are.
    """

    def __init__(self, axis: str, group: Any, device: torch.device) -> None:
        self.axis, self.group, self.device = axis, group, device

    @property
    def num_ranks(self) -> int:
        """Number of ranks along the axis."""
        return int(dist.get_world_size(self.group))

    def measure(
        self,
        operations: Sequence[str],
        sizes: Sequence[int],
        *,
        repeats: int,
        budget_s: float,
        agree: Callable[[float], float],
    ) -> list[Sample]:
        """Time each operation at each size, small sizes first.

        Args:
            operations: Some of `MEASURED_OPERATIONS`.
            sizes: Bytes of the whole tensor.
            repeats: Number of timings; the median counts.
            budget_s: Seconds after which no further size is measured.
            agree: Returns the maximum over all ranks of the world: groups along one axis differ a little, and either
                all continue or none.
        """
        began = time.perf_counter()
        samples: list[Sample] = []
        for size in sorted(sizes):
            if agree(time.perf_counter() - began) > budget_s:
                break
            for operation in operations:
                call, whole = self._call(operation, size)
                seconds = agree(self.median(call, repeats)) / (2 if operation == "send" else 1)
                samples.append(Sample(self.axis, self.num_ranks, operation, whole, seconds))
        return samples

    def slowest(self, seconds: float) -> float:
        """The maximum of a number over all ranks of the axis."""
        return self.slowest_of([seconds])[0]

    def slowest_of(self, seconds: Sequence[float]) -> list[float]:
        """The maximum of each number over all ranks of the axis."""
        values = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        slowest: list[float] = values.tolist()
        return slowest

    def wait(self) -> None:
        """Wait until all ranks of the axis have arrived and their devices are idle."""
        dist.barrier(group=self.group)
        self.synchronize()

    def rounds(self, repeats: int, *, least: int = 1, limit_s: float = _LIMIT_S) -> Iterator[int]:
        """Count the repeats of a measurement, each of which begins when all ranks have arrived.

        They end early, on all ranks at once, if they take too long on any: on a busy machine, or with a large model.

        Args:
            repeats: At most.
            least: At least.
            limit_s: Seconds after which no further one begins.
        """
        began = time.perf_counter()
        for number in range(repeats):
            if number >= least and self.slowest(time.perf_counter() - began) > limit_s:
                return
            self.wait()
            yield number

    def synchronize(self) -> None:
        """Wait until this rank's device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median(self, call: Callable[[], object], repeats: int, count: int = _CALLS) -> float:
        """Seconds per call on this rank, while all ranks run it: the median of timings of `count` calls."""
        call()
        taken = []
        for _ in self.rounds(repeats):
            start = time.perf_counter()
            for _ in range(count):
                call()
            self.synchronize()
            taken.append((time.perf_counter() - start) / count)
        return statistics.median(taken)

    def median_of_steps(
        self, step: Callable[[], object], repeats: int, prepare: Callable[[], object] = lambda: None
    ) -> float:
        """Seconds of a step on the slowest rank, after warm-ups; what prepares it does not count."""
        taken = []
        for _ in self.rounds(repeats + WARM_UPS, least=WARM_UPS + 1):
            prepare()
            start = time.perf_counter()
            step()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(self.slowest_of(taken[WARM_UPS:]))

    def _call(self, operation: str, size: int) -> tuple[Callable[[], object], int]:
        """The call to time, and the bytes of its whole tensor."""
        group, num_ranks = self.group, self.num_ranks
        part = torch.zeros(max(1, size // 4 // num_ranks), device=self.device)
        whole = torch.zeros(len(part) * num_ranks, device=self.device)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: all_gather_single(whole, part, group=group),
            "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
            "send": lambda: self._round_trip(whole),
        }
        return calls[operation], whole.nbytes

    def _round_trip(self, tensor: torch.Tensor) -> None:
        """Exchange messages between pairs of neighbours; with an odd number of ranks, the last one is idle."""
        rank, group = dist.get_rank(self.group), self.group
        if rank % 2:
            dist.recv(tensor, group=group, group_src=rank - 1)
            dist.send(tensor, group=group, group_dst=rank - 1)
        elif rank + 1 < self.num_ranks:
            dist.send(tensor, group=group, group_dst=rank + 1)
            dist.recv(tensor, group=group, group_src=rank + 1)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit y = a + b x, a and b at least 0, minimizing the sum of squared relative errors.

    Args:
        points: (x, y) with y above 0.

    Returns:
        (a, b).
    """
    weights = [1.0 / (y * y) for _, y in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if not spread:
        return y_mean, 0.0
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points, strict=True)) / spread
    if slope < 0:
        return y_mean, 0.0
    start = y_mean - slope * x_mean
    if start >= 0:
        return start, slope
    squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    return 0.0, sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares


def fit_link(axis: str, samples: Sequence[Sample], where: str) -> Link:
    """Fit a link to an axis's samples: latency and bandwidth of each measured operation.

    Args:
        axis: Its name.
        samples: Samples of this axis.
        where: What was measured, as text.
    """
    costs: dict[str, Cost] = {}
    for operation in dict.fromkeys(sample.operation for sample in samples):
        matching = [sample for sample in samples if sample.operation == operation]
        start, slope = fit_line([(float(sample.bytes), sample.seconds) for sample in matching])
        rounds, volume = rounds_and_volume(operation, matching[0].num_ranks)
        costs[operation] = Cost(start / rounds, slope / volume)
    plain = costs.get("send") or next(iter(costs.values()))
    bandwidth = 1.0 / plain.s_per_byte if plain.s_per_byte else float("inf")
    return Link(f"measured on {axis}", plain.latency_s, bandwidth, where, measured=costs)


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


def seconds_of(bench: AxisBenchmark, call: Callable[[], object], repeats: int, count: int = _CALLS) -> float:
    """Return seconds per call on the slowest rank, while all ranks run it; see `AxisBenchmark.median`."""
    return bench.slowest(bench.median(call, repeats, count))


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

    def set_gradients() -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)

    return bench.median_of_steps(optimizer(parameters).step, repeats, set_gradients)


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
        slowest = bench.median_of_steps(_stepper(bench, source, optimizer, strategy), repeats)
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
