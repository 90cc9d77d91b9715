"""Check runs of a calibration: what it predicts for measurements that it was not fitted to."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from axon_nb.plan.calibration.collectives import AxisBenchmark, fit_link
from axon_nb.plan.calibration.compute import seconds_of
from axon_nb.plan.calibration.result import Check, Sample
from axon_nb.plan.hardware.rates import Rates, Work

_SHAPES = {"cpu": (384, 160, 448), "cuda": (5120, 1536, 3072)}
"""Rows, inner size and columns of a product that is not square."""
_ELEMENTS = {"cpu": 3 << 18, "cuda": 3 << 24}
_LEAST_SIZES = 3
"""A line through fewer points predicts nothing about another one."""


def check_rates(bench: AxisBenchmark, rates: Rates, *, repeats: int, dtype: torch.dtype) -> tuple[Check, ...]:
    """Measure a matrix product and an elementwise operation of other shapes than the rates were fitted to.

    Args:
        bench: Benchmark of the ranks that compute.
        rates: The rates to check.
        repeats: Number of timings; the median counts.
        dtype: The dtype of the tensors.
    """
    kind = bench.device.type if bench.device.type in _SHAPES else "cpu"
    rows, inner, columns = _SHAPES[kind]
    a, b = (torch.ones(shape, device=bench.device, dtype=dtype) for shape in ((rows, inner), (inner, columns)))
    x = torch.ones(_ELEMENTS[kind], device=bench.device, dtype=dtype)
    runs = {
        f"matrix product of {rows} x {inner} x {columns}": (
            Work(2.0 * rows * inner * columns, 0.0, 1),
            functools.partial(torch.matmul, a, b),
        ),
        f"elementwise operation on {x.numel():,} elements": (
            Work(0.0, 3.0 * x.nbytes, 1),
            functools.partial(torch.add, x, x.clone()),
        ),
    }
    return tuple(
        Check(name, seconds_of(bench, call, repeats), rates.seconds(work, "")) for name, (work, call) in runs.items()
    )


def check_collectives(samples: Sequence[Sample]) -> Iterator[Check]:
    """Yield each measured size of each collective with what the other sizes predict for it; the ends are left out.

    Args:
        samples: Samples of one axis.
    """
    for operation in dict.fromkeys(sample.operation for sample in samples):
        measured = sorted((sample for sample in samples if sample.operation == operation), key=lambda one: one.bytes)
        for number in range(1, len(measured) - 1) if len(measured) >= _LEAST_SIZES else ():
            one = measured[number]
            link = fit_link(one.axis, [other for other in measured if other is not one], "")
            predicted = link.seconds(operation, one.bytes, one.num_ranks)
            yield Check(f"{operation} of {one.bytes:,} bytes along {one.axis}", one.seconds, predicted)
