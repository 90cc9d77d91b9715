"""Times collectives on running ranks. Every rank makes these calls together, and all get the same results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.collectives.direct import all_gather_single, reduce_scatter_single
from axon_nb.plan.calibration.result import Sample
from axon_nb.plan.hardware.links import Cost, Link, rounds_and_volume

MEASURED_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
"""Operations that are measured, in this order."""

_CALLS = 4
"""Calls per timing."""
_LIMIT_S = 3.0
"""Seconds after which a measurement is not repeated again."""


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
                seconds = agree(self._median(call, repeats)) / (2 if operation == "send" else 1)
                samples.append(Sample(self.axis, self.num_ranks, operation, whole, seconds))
        return samples

    def slowest(self, seconds: float) -> float:
        """The maximum of a number over all ranks of the axis."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return float(value)

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

    def _median(self, call: Callable[[], object], repeats: int) -> float:
        call()
        taken = []
        for _ in self.rounds(repeats):
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            self.synchronize()
            taken.append((time.perf_counter() - start) / _CALLS)
        return statistics.median(taken)

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
